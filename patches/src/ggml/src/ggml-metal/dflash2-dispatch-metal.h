// The table of dflash2-dispatch.h for Metal: mul_mv_ext up to so many rows and mul_mm above, and the rows of one pass.
//
// By name from ggml_backend_reg_get_proc_address: dflash2_dispatch_force, void (int rows): every quantised product as
// if its entry were `rows`; -1: the table.
#pragma once

#include "../dflash2-dispatch.h"
#include "ggml-impl.h"

#include <atomic>
#include <cstring>

inline std::atomic<int> dflash2_metal_forced{ -1 };

inline const dflash2::dispatch_limits & dflash2_metal_limits() {
    // A Mac has one GPU, so an entry for any device is enough; 0 stands for it.
    static const dflash2::dispatch_limits limits = dflash2::dispatch_for(
        dflash2::dispatch_load(
            [](const std::string & problem) { GGML_LOG_WARN("kernel table: %s\n", problem.c_str()); }),
        "metal", 0);
    return limits;
}

// Rows that stay with mul_mv_ext or mul_mv; `stock` where the table says nothing.
inline int64_t dflash2_metal_vector_rows(ggml_type type, int64_t stock) {
    const int forced = dflash2_metal_forced.load(std::memory_order_relaxed);
    if (forced >= 0 && ggml_is_quantized(type)) {
        return forced;
    }
    const int limit = dflash2_metal_limits().of(dflash2::DISPATCH_MUL_MAT, type);
    return limit < 0 ? stock : limit;
}

// How many of `rows` mul_mv_ext takes at once; `stock` where the table says nothing. Kernels exist for 2 to 5.
inline int16_t dflash2_metal_pass_rows(ggml_type type, int rows, int16_t stock) {
    const int most = dflash2_metal_limits().of(dflash2::DISPATCH_PASS, type);
    return most < 0 ? stock : (int16_t) dflash2::dispatch_pass_rows(rows, most);
}

inline void dflash2_metal_force(int rows) {
    dflash2_metal_forced = rows < dflash2::DISPATCH_MAX_ROWS ? rows : dflash2::DISPATCH_MAX_ROWS;
}

inline void * dflash2_metal_proc_address(const char * name) {
    return strcmp(name, "dflash2_dispatch_force") == 0 ? (void *) dflash2_metal_force : nullptr;
}
