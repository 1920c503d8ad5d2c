// Greedy choice without a sampler chain: where a request can only choose the argmax, its rows are searched for it
// directly, on the device that computed them if there is one, instead of being copied into an array of candidates.

#pragma once

#include "common.h"
#include "llama.h"

#include <vector>

// Replaces `samplers` by one greedy sampler if params.greedy allows it and they can select nothing but the argmax;
// `constrained`: a grammar or a reasoning budget comes before them.
void dflash2_reduce_to_greedy(std::vector<llama_sampler *> & samplers, const common_params_sampling & params,
        bool constrained);

// The token for row `idx` of the last batch, if `chain` is what dflash2_reduce_to_greedy makes; else false.
bool dflash2_greedy_token(llama_sampler * chain, llama_context * ctx, int idx, llama_token & id);

// whether such a chain should run where the logits are: there is a GPU
bool dflash2_greedy_on_backend(llama_sampler * chain);
