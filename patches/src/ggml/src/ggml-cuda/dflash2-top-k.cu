#include "dflash2-cuda.cuh"

#include "../dflash2-switch.h"
#include "dflash2-top-k-kernel.cuh"

#include <atomic>
#include <climits>

static std::atomic<uint64_t> n_top_k{0};

bool ggml_cuda_dflash2_top_k(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    static const bool off = dflash2_switched_off("DFLASH2_NO_TOPK");

    const ggml_tensor * src     = dst->src[0];
    const int64_t       n_cols  = src->ne[0];
    const int64_t       n_rows  = ggml_nrows(src);
    const int64_t       k       = dst->ne[0];
    const int64_t       n_parts = (n_cols + DFLASH2_TOP_K_PART - 1) / DFLASH2_TOP_K_PART;

    // up to 1024 columns the op sorts in one launch itself
    if (off || n_cols <= 1024 || k < 1 || k > DFLASH2_TOP_K_MAX || n_parts * k > DFLASH2_TOP_K_MERGEABLE ||
            n_rows > USHRT_MAX || !ggml_is_contiguous(src) || !ggml_is_contiguous(dst)) {
        return false;
    }

    cudaStream_t                   stream = ctx.stream();
    ggml_cuda_pool_alloc<uint64_t> parts(ctx.pool(), n_rows * n_parts * k);

    dflash2_top_k_scan<<<dim3(n_parts, n_rows), DFLASH2_TOP_K_SCAN, 0, stream>>>(
            (const float *) src->data, parts.get(), (int *) dst->data, (int) n_cols, (int) k);
    CUDA_CHECK(cudaGetLastError());
    if (n_parts > 1) {
        dflash2_top_k_merge<<<n_rows, DFLASH2_TOP_K_MERGE, 0, stream>>>(parts.get(), (int *) dst->data, (int) (n_parts * k), (int) k);
        CUDA_CHECK(cudaGetLastError());
    }
    n_top_k.fetch_add(1, std::memory_order_relaxed);
    return true;
}

uint64_t ggml_cuda_dflash2_top_k_count(void) {
    return n_top_k.load(std::memory_order_relaxed);
}
