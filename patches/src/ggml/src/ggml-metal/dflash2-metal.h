// Metal kernels of llama-dflash2: switches, counters and the check of the fusion table's entry.
#pragma once

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend_graph_optimize_params;

enum dflash2_metal_kernel { DFLASH2_METAL_CONV, DFLASH2_METAL_TOP_K, DFLASH2_METAL_KERNELS };

// DFLASH2_NO_TOPK=1
bool ggml_metal_dflash2_top_k_off(void);

// True if the convolution that ends at `last` starts at node `first`. Off: DFLASH2_NO_CONV=1.
bool ggml_metal_dflash2_is_conv(const struct ggml_cgraph * gf, int first, const struct ggml_tensor * last);

// Keeps the inputs of every convolution pattern allocated until the output has its place.
void ggml_metal_dflash2_alloc_deps(struct ggml_cgraph * gf, struct ggml_backend_graph_optimize_params * params);

void ggml_metal_dflash2_counted(enum dflash2_metal_kernel kernel);

// How often this process encoded each kernel.
GGML_BACKEND_API uint64_t ggml_metal_dflash2_conv_count(void);
GGML_BACKEND_API uint64_t ggml_metal_dflash2_top_k_count(void);

#ifdef __cplusplus
}
#endif
