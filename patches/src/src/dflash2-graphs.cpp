#include "dflash2-graphs.h"

#include "../ggml/src/dflash2-switch.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>

// An injection of more rows belongs to a prompt: it comes once, and its graph is large.
static constexpr uint32_t LEAST_LIMIT = 16;

// Every graph costs about 1 MB of the host's memory; more than these many are those of sequences that come and go.
static constexpr size_t MOST_GRAPHS = 64;

void dflash2_graphs::guest::swap() {
    std::swap(host->sched,   other->sched);
    std::swap(host->results, other->results);
    std::swap(host->active,  other->active);
}

dflash2_graphs::guest dflash2_graphs::enter(fields host, const llama_model & model, const llama_ubatch & ubatch,
        const std::function<ggml_backend_sched_t()> & new_sched) {
    static const bool off = dflash2_switched_off("DFLASH2_NO_GRAPH_PAIR");
    const uint32_t limit = std::max(model.hparams.dflash_block_size, LEAST_LIMIT);
    if (off || model.arch != LLM_ARCH_DFLASH || !ubatch.embd || ubatch.n_tokens > limit || ubatch.n_seqs_unq != 1) {
        return {};
    }
    const std::pair<uint32_t, llama_seq_id> key(ubatch.n_tokens, ubatch.seq_id_unq[0]);
    if (graphs.size() >= MOST_GRAPHS && graphs.count(key) == 0) {
        graphs.clear();
    }
    graph & own = graphs[key];
    if (!own.sched) {
        own.sched.reset(new_sched());
    }
    return guest(host, { own.sched, own.results, own.active });
}

size_t dflash2_graphs::buffer_size(ggml_backend_t backend) const {
    size_t size = 0;
    for (const auto & [key, own] : graphs) {
        size += own.sched ? ggml_backend_sched_get_buffer_size(own.sched.get(), backend) : 0;
    }
    return size;
}

int64_t dflash2_graph_rebuilds(const llama_context * ctx) {
    return ctx->dflash2.n_rebuilt;
}
