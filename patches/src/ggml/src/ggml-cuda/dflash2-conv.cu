#include "dflash2-cuda.cuh"

#include "../dflash2-conv-match.h"
#include "../dflash2-switch.h"
#include "dflash2-conv-kernel.cuh"

#include <atomic>
#include <climits>

static std::atomic<uint64_t> n_conv{0};

static bool conv_off() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_CONV");
    return off;
}

template <int TAPS>
static void launch(const dflash2_conv & m, cudaStream_t stream) {
    constexpr int threads = 128;
    const dim3 grid((m.width + threads - 1) / threads, m.block * m.n_blocks);
    dflash2_conv_kernel<TAPS><<<grid, threads, 0, stream>>>(
            (const float *) m.x->data, (const float *) m.delta->data, (const float *) m.base->data, (float *) m.dst->data,
            (int) m.width, (int) m.group, (int) m.block, (int) m.n_taps,
            (int) m.delta_tap, (int) m.delta_row, (int) m.base_tap);
}

int ggml_cuda_dflash2_try_conv(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i) {
    dflash2_conv m;
    if (cgraph->nodes[i]->op != GGML_OP_REPEAT || conv_off() || !dflash2_match_conv(cgraph, i, m) ||
            !dflash2_conv_is_safe(m, false) || m.block * m.n_blocks > USHRT_MAX || m.n_taps * m.width > INT_MAX ||
            m.delta_row > INT_MAX || m.base_tap * m.n_taps > INT_MAX) {
        return 0;
    }
    if (m.n_taps <= 2) {
        launch<2>(m, ctx.stream());
    } else {
        launch<DFLASH2_CONV_MAX_TAPS>(m, ctx.stream());
    }
    CUDA_CHECK(cudaGetLastError());
    n_conv.fetch_add(1, std::memory_order_relaxed);
    return m.n_after;
}

void ggml_cuda_dflash2_conv_alloc_deps(ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params) {
    if (!conv_off()) {
        dflash2_conv_add_alloc_deps(cgraph, params);
    }
}

uint64_t ggml_cuda_dflash2_conv_count(void) {
    return n_conv.load(std::memory_order_relaxed);
}
