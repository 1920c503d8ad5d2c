#include "dflash2-greedy.h"

#include "../ggml/src/dflash2-switch.h"

#include <algorithm>
#include <cstring>

static bool disabled() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_GREEDY");
    return off;
}

// whether the largest logit of a row stays the largest, and in
static bool keeps_argmax(const llama_sampler * smpl) {
    static const char * const names[] = { "top-n-sigma", "top-k", "top-p", "min-p", "temp-ext", "dist" };
    const char * name = llama_sampler_name(smpl);
    return name[0] == '?' || std::any_of(std::begin(names), std::end(names),
            [name](const char * kept) { return std::strcmp(name, kept) == 0; });
}

static bool is_greedy(llama_sampler * chain) {
    const llama_sampler * only = llama_sampler_chain_n(chain) == 1 ? llama_sampler_chain_get(chain, 0) : nullptr;
    return only != nullptr && std::strcmp(llama_sampler_name(only), "greedy") == 0;
}

// The first of the largest of `logits` [n]. Few chunks hold anything larger than what came before, and whether one
// does is asked of its 16 at once.
static llama_token argmax(const float * logits, int32_t n) {
    int32_t best = 0;
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const float top = logits[best];
        int larger = 0;
        for (int32_t k = 0; k < 16; ++k) {
            larger |= logits[i + k] > top;
        }
        for (int32_t k = i; larger && k < i + 16; ++k) {
            best = logits[k] > logits[best] ? k : best;
        }
    }
    for (; i < n; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

void dflash2_reduce_to_greedy(std::vector<llama_sampler *> & samplers, const common_params_sampling & params,
        bool constrained) {
    const auto & order = params.samplers;
    // with probabilities to report or a temperature that moves, the candidates are needed
    const bool only_argmax = params.temp <= 0.0f && params.dynatemp_range <= 0.0f && params.n_probs == 0 &&
        std::find(order.begin(), order.end(), COMMON_SAMPLER_TYPE_TEMPERATURE) != order.end();
    if (!params.greedy || !only_argmax || constrained || disabled() ||
            !std::all_of(samplers.begin(), samplers.end(), keeps_argmax)) {
        return;
    }
    std::for_each(samplers.begin(), samplers.end(), llama_sampler_free);
    samplers = { llama_sampler_init_greedy() };
}

bool dflash2_greedy_token(llama_sampler * chain, llama_context * ctx, int idx, llama_token & id) {
    if (!is_greedy(chain)) {
        return false;
    }
    id = llama_get_sampled_token_ith(ctx, idx);
    if (id != LLAMA_TOKEN_NULL) {
        return true;
    }
    // a backend that cannot run the chain hands out the logits as what is left to sample from
    const float * logits = llama_get_sampled_logits_ith(ctx, idx);
    if (logits == nullptr) {
        logits = llama_get_logits_ith(ctx, idx);
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    id = argmax(logits, n_vocab);
    return true;
}

bool dflash2_greedy_on_backend(llama_sampler * chain) {
    return is_greedy(chain) && ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != nullptr;
}
