#include "dflash2-metal.h"

#include "../dflash2-conv-match.h"
#include "../dflash2-switch.h"

#include <atomic>

static std::atomic<uint64_t> counts[DFLASH2_METAL_KERNELS];

static bool conv_off() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_CONV");
    return off;
}

bool ggml_metal_dflash2_top_k_off(void) {
    static const bool off = dflash2_switched_off("DFLASH2_NO_TOPK");
    return off;
}

bool ggml_metal_dflash2_is_conv(const ggml_cgraph * gf, int first, const ggml_tensor * last) {
    dflash2_conv m;
    return !conv_off() && dflash2_match_conv(gf, first, m) && m.dst == last;
}

void ggml_metal_dflash2_alloc_deps(ggml_cgraph * gf, ggml_backend_graph_optimize_params * params) {
    if (!conv_off()) {
        dflash2_conv_add_alloc_deps(gf, params);
    }
}

void ggml_metal_dflash2_counted(dflash2_metal_kernel kernel) {
    counts[kernel].fetch_add(1, std::memory_order_relaxed);
}

uint64_t ggml_metal_dflash2_conv_count(void) {
    return counts[DFLASH2_METAL_CONV].load(std::memory_order_relaxed);
}

uint64_t ggml_metal_dflash2_top_k_count(void) {
    return counts[DFLASH2_METAL_TOP_K].load(std::memory_order_relaxed);
}
