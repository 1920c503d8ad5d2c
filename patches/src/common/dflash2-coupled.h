// Coupled verification: target and drafts are drawn with the same noise, so that they agree more often, while the
// target's tokens depend on its logits, the seed and the position alone, drafts or not.

#pragma once

#include "common.h"
#include "llama.h"

#include <vector>

struct common_arg;

// how the drafts of one block are drawn
struct dflash2_chance {
    bool     coupled     = false; // false: argmax
    uint32_t seed        = 0;
    int64_t  position    = 0;     // of the first draft; counted in tokens the target's sampler has accepted
    float    temperature = 1.0f;
};

// --spec-draft-verify
common_arg dflash2_verify_arg();

// whether requests are to be sampled with coupled noise
bool dflash2_verify_coupled(const common_params_speculative & params);

// The last sampler of a chain whose others are `before`: coupled noise if params.coupled asks for it, else llama.cpp's
// dist, as also behind a sampler that keeps random numbers and where the temperature leaves only the argmax.
llama_sampler * dflash2_init_dist(const std::vector<llama_sampler *> & before, const common_params_sampling & params);

// Applies a grammar to the candidates before `chain`. If that is coupled, tokens that the grammar forbids are dropped
// (unless that leaves none), and where the chain begins with a top-k, only as many are looked at as that needs.
void dflash2_apply_grammar(llama_sampler * grammar, llama_sampler * chain, const common_params_sampling & params,
        llama_token_data_array * cur_p);

// how to draw drafts for the next positions of a sequence sampled by `chain`
dflash2_chance dflash2_chain_chance(llama_sampler * chain);

// index among `ids` [k] of the draft at `offset` in its block; scores [k]: S after its predecessor; `best`: their argmax
int32_t dflash2_successor(const dflash2_chance & chance, int32_t offset, const float * ids, const float * scores,
        int32_t k, int32_t best);

// the same of a drafter without selector: brings the draft to the front of its candidates, which are sorted
void dflash2_draw_first(const dflash2_chance & chance, int32_t offset, llama_token_data_array * cur_p);
