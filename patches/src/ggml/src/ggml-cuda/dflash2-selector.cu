#include "dflash2-cuda.cuh"

#include "../dflash2-selector-match.h"
#include "../dflash2-switch.h"
#include "dflash2-selector-kernel.cuh"

#include <atomic>
#include <climits>

static std::atomic<uint64_t> n_selector{0};

static bool selector_off() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_SELECTOR");
    return off;
}

int ggml_cuda_dflash2_try_selector(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i) {
    dflash2_selector m;
    if (cgraph->nodes[i]->op != GGML_OP_MUL || selector_off() || !dflash2_match_selector(cgraph, i, m) ||
            !dflash2_selector_is_safe(m) || m.predecessor->ne[3] > USHRT_MAX) {
        return 0;
    }
    const auto stride = [](const ggml_tensor * t, int dim) { return (int64_t) (t->nb[dim] / sizeof(float)); };

    const dflash2_selector_args args = {
        (int) m.predecessor->ne[1], (int) m.predecessor->ne[0], (int) m.predecessor->ne[2],
        stride(m.predecessor, 1), stride(m.successor, 1),
        stride(m.predecessor, 2), stride(m.successor, 2), stride(m.gate, 2), stride(m.unary, 2), stride(m.ids_view, 1),
        stride(m.predecessor, 3), stride(m.successor, 3), stride(m.gate, 3), stride(m.unary, 3), stride(m.ids_view, 2),
    };
    // the ids are read before their cast: same offset, same strides
    const int * ids = (const int *) ((const char *) m.ids->data + m.ids_view->view_offs);

    dflash2_selector_kernel<<<dim3(m.predecessor->ne[2], m.predecessor->ne[3]), DFLASH2_SELECTOR_THREADS, 0, ctx.stream()>>>(
            (const float *) m.predecessor->data, (const float *) m.successor->data, (const float *) m.gate->data,
            (const float *) m.unary->data, ids, (float *) m.dst->data, args);
    CUDA_CHECK(cudaGetLastError());
    n_selector.fetch_add(1, std::memory_order_relaxed);
    return m.n_after;
}

void ggml_cuda_dflash2_selector_alloc_deps(ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params) {
    if (!selector_off()) {
        dflash2_selector_add_alloc_deps(cgraph, params);
    }
}

uint64_t ggml_cuda_dflash2_selector_count(void) {
    return n_selector.load(std::memory_order_relaxed);
}
