#include "dflash2-coupled.h"

#include "arg.h"
#include "dflash2-noise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

namespace {

struct coupled_sampler {
    uint32_t seed;        // as asked for
    uint32_t seed_cur;    // as used: never LLAMA_DEFAULT_SEED's "random"
    float    temperature;
    int64_t  n_accepted;  // where the next token stands, prompt included
};

coupled_sampler * state_of(const llama_sampler * smpl) {
    return static_cast<coupled_sampler *>(smpl->ctx);
}

uint32_t fresh_seed(uint32_t seed) {
    return seed == LLAMA_DEFAULT_SEED ? std::random_device{}() : seed;
}

const char * coupled_name(const llama_sampler *) {
    return "coupled";
}

void coupled_accept(llama_sampler * smpl, llama_token) {
    state_of(smpl)->n_accepted++;
}

// Selects argmax(logit + noise) and sets p. Two logarithms a token are dear over a whole vocabulary, so they are taken
// only of those that can win: to lift a token to `reach` its noise must be so large that 1 - u <= exp(logit - reach).
void coupled_apply(llama_sampler * smpl, llama_token_data_array * cur_p) {
    constexpr float margin = 1.001f; // covers the rounding of that bound

    if (cur_p->size == 0) {
        cur_p->selected = -1;
        return;
    }

    const auto * state = state_of(smpl);
    const dflash2_noise noise(state->seed_cur, state->n_accepted);

    llama_token_data * const begin = cur_p->data;
    llama_token_data * const end   = begin + cur_p->size;
    const llama_token_data * favourite = cur_p->sorted ? begin : std::max_element(begin, end,
            [](const llama_token_data & a, const llama_token_data & b) { return a.logit < b.logit; });

    cur_p->selected = favourite - begin;
    const float top = favourite->logit;
    if (!(top > -INFINITY)) {
        return;
    }

    double sum = 0.0;
    for (llama_token_data * t = begin; t != end; ++t) {
        t->p = std::exp(t->logit - top);
        sum += t->p;
    }

    double best = double(top) + dflash2_noise::gumbel(noise.bits(favourite->id));
    const float  scale = float(std::exp(top - best)) * margin;
    const double norm  = 1.0 / sum;
    for (llama_token_data * t = begin; t != end; ++t) {
        const uint64_t bits = noise.bits(t->id);
        if (dflash2_noise::rest(bits) <= t->p * scale) {
            const double key = double(t->logit) + dflash2_noise::gumbel(bits);
            if (key > best) {
                best = key;
                cur_p->selected = t - begin;
            }
        }
        t->p = float(t->p * norm);
    }
}

void coupled_reset(llama_sampler * smpl) {
    auto * state = state_of(smpl);
    state->seed_cur   = fresh_seed(state->seed);
    state->n_accepted = 0;
}

llama_sampler * coupled_clone(const llama_sampler * smpl);

void coupled_free(llama_sampler * smpl) {
    delete state_of(smpl);
}

void coupled_copy_state(const llama_sampler * src, llama_sampler * dst) {
    *state_of(dst) = *state_of(src);
}

llama_sampler_i coupled_iface = {
    /* .name              = */ coupled_name,
    /* .accept            = */ coupled_accept,
    /* .apply             = */ coupled_apply,
    /* .reset             = */ coupled_reset,
    /* .clone             = */ coupled_clone,
    /* .free              = */ coupled_free,
    /* .backend_init      = */ nullptr,
    /* .backend_accept    = */ nullptr,
    /* .backend_apply     = */ nullptr,
    /* .backend_set_input = */ nullptr,
    /* .backend_reset     = */ nullptr,
    /* .copy_state        = */ coupled_copy_state,
};

llama_sampler * coupled_clone(const llama_sampler * smpl) {
    return llama_sampler_init(&coupled_iface, new coupled_sampler(*state_of(smpl)));
}

// whether what the sampler leaves of a row depends on nothing but the row and the tokens accepted before
bool is_pure(const llama_sampler * smpl) {
    static const char * const names[] = {
        "logit-bias", "penalties", "dry", "top-n-sigma", "top-k", "typical", "top-p", "min-p", "temp-ext", "infill",
    };
    const char * name = llama_sampler_name(smpl);
    return name[0] == '?' || std::any_of(std::begin(names), std::end(names),
            [name](const char * pure) { return std::strcmp(name, pure) == 0; });
}

// k if the first sampler with any effect is a top-k, else 0
size_t leading_top_k(llama_sampler * chain, const common_params_sampling & params) {
    for (int32_t i = 0; i < llama_sampler_chain_n(chain); ++i) {
        const char * name = llama_sampler_name(llama_sampler_chain_get(chain, i));
        if (name[0] != '?') {
            return std::strcmp(name, "top-k") == 0 ? params.top_k : 0;
        }
    }
    return 0;
}

bool is_likelier(const llama_token_data & a, const llama_token_data & b) {
    return a.logit > b.logit;
}

// unless that leaves none
void drop_forbidden(llama_token_data_array * cur_p) {
    const llama_token_data * kept = std::remove_if(cur_p->data, cur_p->data + cur_p->size,
            [](const llama_token_data & t) { return !(t.logit > -INFINITY); });
    if (kept != cur_p->data) {
        cur_p->size = kept - cur_p->data;
    }
}

} // namespace

common_arg dflash2_verify_arg() {
    common_arg arg(
        {"--spec-draft-verify"}, "{coupled,match}",
        "how sampled tokens verify drafts: 'coupled' draws target and drafts with the same noise, made from the seed "
        "(more drafts accepted; a seed gives one text with and without drafting), 'match' uses the sampler as it is "
        "(default: coupled with draft-dflash, else match)",
        [](common_params & params, const std::string & value) {
            if (value != "coupled" && value != "match") {
                throw std::invalid_argument("must be coupled or match");
            }
            params.speculative.verify_coupled = value == "coupled";
        });
    return arg.set_spec().set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI}).set_env("LLAMA_ARG_SPEC_DRAFT_VERIFY");
}

bool dflash2_verify_coupled(const common_params_speculative & params) {
    if (params.verify_coupled >= 0) {
        return params.verify_coupled > 0;
    }
    const auto & types = params.types;
    return std::find(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) != types.end();
}

llama_sampler * dflash2_init_dist(const std::vector<llama_sampler *> & before, const common_params_sampling & params) {
    const auto & order = params.samplers;
    const bool has_temperature = std::find(order.begin(), order.end(), COMMON_SAMPLER_TYPE_TEMPERATURE) != order.end();
    const float temperature = has_temperature ? params.temp : 1.0f;

    if (!params.coupled || temperature <= 0.0f || !std::all_of(before.begin(), before.end(), is_pure)) {
        return llama_sampler_init_dist(params.seed);
    }
    return llama_sampler_init(&coupled_iface, new coupled_sampler { params.seed, fresh_seed(params.seed), temperature, 0 });
}

dflash2_chance dflash2_chain_chance(llama_sampler * chain) {
    const llama_sampler * last = llama_sampler_chain_get(chain, llama_sampler_chain_n(chain) - 1);
    if (last == nullptr || last->iface != &coupled_iface) {
        return {};
    }
    const auto * state = state_of(last);
    return { true, state->seed_cur, state->n_accepted, state->temperature };
}

void dflash2_apply_grammar(llama_sampler * grammar, llama_sampler * chain, const common_params_sampling & params,
        llama_token_data_array * cur_p) {
    if (!dflash2_chain_chance(chain).coupled) {
        llama_sampler_apply(grammar, cur_p);
        return;
    }
    // a grammar reads every token it is given, so give it the best ones first
    const size_t k = leading_top_k(chain, params);
    if (k > 0 && 8 * k < cur_p->size) {
        std::vector<llama_token_data> best(8 * k);
        std::partial_sort_copy(cur_p->data, cur_p->data + cur_p->size, best.begin(), best.end(), is_likelier);
        llama_token_data_array few = { best.data(), best.size(), -1, true };
        llama_sampler_apply(grammar, &few);
        drop_forbidden(&few);
        if (few.size >= k && few.data[0].logit > -INFINITY) {
            std::copy(few.data, few.data + few.size, cur_p->data);
            cur_p->size   = few.size;
            cur_p->sorted = true;
            return;
        }
    }
    llama_sampler_apply(grammar, cur_p);
    drop_forbidden(cur_p);
}

int32_t dflash2_successor(const dflash2_chance & chance, int32_t offset, const float * ids, const float * scores,
        int32_t k, int32_t best) {
    if (!chance.coupled) {
        return best;
    }
    const dflash2_noise noise(chance.seed, chance.position + offset);
    double highest = -INFINITY;
    for (int32_t i = 0; i < k; ++i) {
        const double key = double(scores[i] / chance.temperature)
            + dflash2_noise::gumbel(noise.bits(llama_token(ids[i])));
        if (key > highest) {
            highest = key;
            best    = i;
        }
    }
    return best;
}

void dflash2_draw_first(const dflash2_chance & chance, int32_t offset, llama_token_data_array * cur_p) {
    if (!chance.coupled) {
        return;
    }
    const dflash2_noise noise(chance.seed, chance.position + offset);
    const auto key = [&](const llama_token_data & t) {
        return double(t.logit / chance.temperature) + dflash2_noise::gumbel(noise.bits(t.id));
    };
    std::swap(cur_p->data[0], *std::max_element(cur_p->data, cur_p->data + cur_p->size,
            [&](const llama_token_data & a, const llama_token_data & b) { return key(a) < key(b); }));
}
