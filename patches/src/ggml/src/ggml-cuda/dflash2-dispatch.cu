// The table of dflash2-dispatch.h for CUDA: MMVQ up to so many rows, MMQ above. Host code only.
//
// By name from ggml_backend_reg_get_proc_address:
//   dflash2_dispatch_force     void (int rows)       every quantised product as if its entry were `rows`; -1: the table
//   dflash2_dispatch_decided   int64_t (int vector)  products that the table sent to MMVQ (1) or MMQ (0) so far
//   dflash2_dispatch_device    int (int device)      the device's number in the table
#include "dflash2-dispatch.cuh"

#include "../dflash2-dispatch.h"
#include "common.cuh"
#include "mmq.cuh"
#include "mmvq.cuh"

#include <algorithm>
#include <atomic>
#include <cstring>

static_assert(dflash2::DISPATCH_MAX_ROWS <= MMVQ_MAX_BATCH_SIZE, "the table allows more rows than MMVQ takes");

static std::atomic<int>     forced_rows{ -1 };
static std::atomic<int64_t> decided[2];

static const dflash2::dispatch_limits & limits_of(int cc) {
    static const dflash2::dispatch_entries entries = dflash2::dispatch_load(
        [](const std::string & problem) { GGML_LOG_WARN("kernel table: %s\n", problem.c_str()); });
    thread_local int                      known = -1;
    thread_local dflash2::dispatch_limits limits;
    if (known != cc) {
        limits = dflash2::dispatch_for(entries, "cuda", cc);
        known  = cc;
    }
    return limits;
}

static int limit_of(dflash2::dispatch_op op, ggml_type type, int cc) {
    const int forced = forced_rows.load(std::memory_order_relaxed);
    return forced >= 0 ? forced : limits_of(cc).of(op, type);
}

int dflash2_cuda_use_mmvq(ggml_type type, int cc, int64_t rows) {
    if (rows < 2 || rows > MMVQ_MAX_BATCH_SIZE) {
        return -1;
    }
    const int limit = limit_of(dflash2::DISPATCH_MUL_MAT, type, cc);
    // Without MMQ the product would go to cuBLAS, which no entry was measured against.
    if (limit < 0 || !ggml_cuda_should_use_mmq(type, cc, rows, 0)) {
        return -1;
    }
    const int vector = rows <= limit;
    decided[vector].fetch_add(1, std::memory_order_relaxed);
    return vector;
}

int dflash2_cuda_id_rows(ggml_type type, int cc, int stock) {
    const int limit = limit_of(dflash2::DISPATCH_MUL_MAT_ID, type, cc);
    if (limit < 0 || !ggml_cuda_should_use_mmq(type, cc, 2, 1)) {
        return stock;
    }
    return std::min(limit, stock);
}

static void force(int rows) {
    forced_rows = std::min(rows, MMVQ_MAX_BATCH_SIZE);
}

static int64_t decisions(int vector) {
    return decided[vector != 0];
}

static int device_number(int device) {
    return ggml_cuda_info().devices[device].cc;
}

void * dflash2_cuda_proc_address(const char * name) {
    if (strcmp(name, "dflash2_dispatch_force") == 0) {
        return (void *) force;
    }
    if (strcmp(name, "dflash2_dispatch_decided") == 0) {
        return (void *) decisions;
    }
    if (strcmp(name, "dflash2_dispatch_device") == 0) {
        return (void *) device_number;
    }
    return nullptr;
}
