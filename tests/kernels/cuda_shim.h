// The part of CUDA C++ that the kernels use, for a host compiler.
#pragma once

#include "lanes.h"

#include <cmath>
#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ LANES_SHARED

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

static dim3 gridDim(1), blockDim(1), blockIdx(0, 0, 0), threadIdx(0, 0, 0);

static inline void  __syncthreads() { lanes::block_barrier(); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline int   min(int a, int b) { return a < b ? a : b; }

static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline int atomicAdd(int * at, int n) {
    const int before = *at;
    *at += n;
    return before;
}

static inline float __shfl_xor_sync(unsigned, float value, int mask, int) {
    return lanes::exchange(value, lanes::lane() ^ mask);
}

template <typename Kernel, typename... Args>
static void launch(dim3 grid, int threads, Kernel kernel, Args... args) {
    gridDim  = grid;
    blockDim = dim3(threads);
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3(x, y, 0);
            lanes::run_block(threads, [&] { kernel(args...); }, [](int lane) { threadIdx = dim3(lane, 0, 0); });
        }
    }
}
