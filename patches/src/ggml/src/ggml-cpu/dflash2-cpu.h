// CPU kernels of llama-dflash2: batched top-k and the fused grouped causal convolution.
#pragma once

#include "ggml-backend.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_cgraph;
struct ggml_backend_graph_optimize_params;
struct ggml_compute_params;
struct ggml_tensor;

// Computes dst = TOP_K(src) in one pass over every row; false (nothing written) if the case is not ours.
// All threads of a graph call it and get the same answer. Off: DFLASH2_NO_TOPK=1.
bool ggml_cpu_dflash2_top_k(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Computes the convolution whose pattern starts at node `node_n`; returns how many nodes follow that one in it
// (they are done too), 0 if there is no such pattern or its buffers overlap. Off: DFLASH2_NO_CONV=1.
int ggml_cpu_dflash2_try_conv(const struct ggml_compute_params * params, const struct ggml_cgraph * cgraph, int node_n);

// Keeps the inputs of every convolution pattern allocated until its output is: the fused kernel reads them late.
void ggml_cpu_dflash2_graph_optimize(
        ggml_backend_t backend, struct ggml_cgraph * cgraph, struct ggml_backend_graph_optimize_params * params);

// How often this process ran each kernel; a test reads them, so that a fusion that stops matching is seen.
GGML_BACKEND_API uint64_t ggml_cpu_dflash2_top_k_count(void);
GGML_BACKEND_API uint64_t ggml_cpu_dflash2_conv_count(void);

#ifdef __cplusplus
}
#endif
