// Live graphs of a DFlash draft context beside the draft's own.
//
// A cycle runs two graphs on this context, inject and draft, and a scheduler holds one. Small injections get a scheduler
// and a graph of their own for each number of rows, so that neither kind is rebuilt because the other one ran.
#pragma once

#include "ggml-cpp.h"
#include "llama-graph.h"

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

class dflash2_graphs {
public:
    // The fields of a context that hold its graph.
    struct fields {
        ggml_backend_sched_ptr & sched;
        std::array<llm_graph_result_ptr, 2> & results;
        llm_graph_result * & active;
    };

    // Until it is destroyed, the fields hold another graph.
    class guest {
    public:
        guest() = default;
        guest(fields host, fields other) : host(new fields(host)), other(new fields(other)) { swap(); }
        guest(guest &&) = default;
        ~guest() { if (host) { swap(); } }

    private:
        void swap();

        std::unique_ptr<fields> host;
        std::unique_ptr<fields> other;
    };

    // Puts the graph of injections like `ubatch` in place, if it has one of its own; `new_sched` makes its scheduler.
    guest enter(fields host, const llama_model & model, const llama_ubatch & ubatch,
            const std::function<ggml_backend_sched_t()> & new_sched);

    // Drops them all; they are made anew when they are needed.
    void clear() { graphs.clear(); }

    // Adds the compute buffers of all of them on `backend`, in bytes.
    size_t buffer_size(ggml_backend_t backend) const;

    // How often a graph of this context was built instead of reused.
    int64_t n_rebuilt = 0;

private:
    struct graph {
        ggml_backend_sched_ptr sched;
        std::array<llm_graph_result_ptr, 2> results;
        llm_graph_result * active = nullptr;
    };

    std::map<std::pair<uint32_t, llama_seq_id>, graph> graphs; // by rows and sequence
};

// How often a graph of `ctx` was built instead of reused, since the context was made.
extern "C" LLAMA_API int64_t dflash2_graph_rebuilds(const llama_context * ctx);
