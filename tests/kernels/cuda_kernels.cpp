// The CUDA kernel bodies on the CPU, launched as their .cu files launch them.

#include "cuda_shim.h"

#include "../../patches/src/ggml/src/ggml-cuda/dflash2-conv-kernel.cuh"
#include "../../patches/src/ggml/src/ggml-cuda/dflash2-selector-kernel.cuh"
#include "../../patches/src/ggml/src/ggml-cuda/dflash2-top-k-kernel.cuh"

#include <vector>

extern "C" {

void cuda_conv(int group, int n_groups, int taps, int block, int n_blocks, int side,
        const float * x, const float * delta, const float * base, float * out) {
    const int  width   = group * n_groups;
    const int  threads = 64;
    const int  n_taps  = taps < block ? taps : block;
    const dim3 grid((width + threads - 1) / threads, block * n_blocks);
    launch(grid, threads, n_taps <= 2 ? dflash2_conv_kernel<2> : dflash2_conv_kernel<4>, x,
            delta + side * taps * n_groups, base + side * taps * width, out,
            width, group, block, n_taps, n_groups, 2 * taps * n_groups, width);
}

void cuda_top_k(const float * src, int n_cols, int n_rows, int k, int * out) {
    const int n_parts = (n_cols + DFLASH2_TOP_K_PART - 1) / DFLASH2_TOP_K_PART;
    std::vector<uint64_t> parts((size_t) n_rows * n_parts * k, 0xa5a5a5a5a5a5a5a5u);
    launch(dim3(n_parts, n_rows), DFLASH2_TOP_K_SCAN, dflash2_top_k_scan, src, parts.data(), out, n_cols, k);
    if (n_parts > 1) {
        launch(dim3(n_rows), DFLASH2_TOP_K_MERGE, dflash2_top_k_merge, (const uint64_t *) parts.data(), out, n_parts * k, k);
    }
}

// predecessor and successor [n_blocks, block, k, rank], gate [n_blocks, block, rank], unary and ids [n_blocks, block, k]:
// row i of the lattice takes predecessors of position i, everything else of position i + 1.
void cuda_selector(int k, int rank, int block, int n_blocks, const float * predecessor, const float * successor,
        const float * gate, const float * unary, const int * ids, float * lattice) {
    const dflash2_selector_args args = {
        k, rank, block - 1, rank, rank, k * rank, k * rank, rank, k, k,
        (int64_t) block * k * rank, (int64_t) block * k * rank, (int64_t) block * rank, (int64_t) block * k, (int64_t) block * k,
    };
    launch(dim3(block - 1, n_blocks), DFLASH2_SELECTOR_THREADS, dflash2_selector_kernel,
            predecessor, successor + k * rank, gate + rank, unary + k, ids + k, lattice, args);
}

}  // extern "C"
