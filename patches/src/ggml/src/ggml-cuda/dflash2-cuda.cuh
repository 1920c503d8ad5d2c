// CUDA kernels of llama-dflash2 (HIP-compatible): batched top-k, the fused convolution, the selector's scores.
#pragma once

#include "common.cuh"

struct ggml_backend_graph_optimize_params;

// dst = TOP_K(src) for all rows in one or two launches; false (nothing launched) if the case is not ours.
// Off: DFLASH2_NO_TOPK=1.
bool ggml_cuda_dflash2_top_k(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Each launches the fused kernel of the pattern that starts at node `i` and returns how many nodes follow that one in
// it, 0 if there is no such pattern or its buffers overlap. Off: DFLASH2_NO_CONV=1, DFLASH2_NO_SELECTOR=1.
int ggml_cuda_dflash2_try_conv(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
int ggml_cuda_dflash2_try_selector(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// Each keeps the inputs of its patterns allocated until the output has its place.
void ggml_cuda_dflash2_conv_alloc_deps(ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params);
void ggml_cuda_dflash2_selector_alloc_deps(ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params);

// How often this process launched each kernel; a replayed CUDA graph counts once, when it is captured.
extern "C" {
GGML_BACKEND_API uint64_t ggml_cuda_dflash2_top_k_count(void);
GGML_BACKEND_API uint64_t ggml_cuda_dflash2_conv_count(void);
GGML_BACKEND_API uint64_t ggml_cuda_dflash2_selector_count(void);
}
