// Device code only: a host shim compiles this file too.
#pragma once

#include <stdint.h>

#define DFLASH2_TOP_K_MAX       64
#define DFLASH2_TOP_K_PER_LANE  16    // keys a thread looks at
#define DFLASH2_TOP_K_SCAN      256   // threads that scan a part of a row
#define DFLASH2_TOP_K_MERGE     512   // threads that merge the parts of a row
#define DFLASH2_TOP_K_PART      (DFLASH2_TOP_K_SCAN  * DFLASH2_TOP_K_PER_LANE)
#define DFLASH2_TOP_K_MERGEABLE (DFLASH2_TOP_K_MERGE * DFLASH2_TOP_K_PER_LANE)

// Orders like the float above and by the lower column below, so that no two columns of a row have equal keys
// and the answer is the same in every run. A NaN sorts by its sign and bits, as in a radix sort.
static __device__ __forceinline__ uint64_t dflash2_key(const float value, const uint32_t column) {
    const uint32_t bits    = __float_as_uint(value);
    const uint32_t ordered = bits ^ ((uint32_t) ((int32_t) bits >> 31) | 0x80000000u);
    return ((uint64_t) ordered << 32) | (uint32_t) ~column;
}

static __device__ __forceinline__ int dflash2_key_column(const uint64_t key) {
    return (int) ~(uint32_t) key;
}

// Writes the k largest of the block's keys through `write(rank, key)`, largest first. `key_at(i)` is called twice for
// every i < n; n is at most THREADS * DFLASH2_TOP_K_PER_LANE and at least k.
//
// The k-th largest of the threads' own largest keys is a bound that at least k keys reach. Fewer than k threads have
// keys above it, so what reaches it fits the shared buffer whatever the data is.
template <int THREADS, typename KeyAt, typename Write>
static __device__ __forceinline__ void dflash2_block_top_k(const int n, const int k, const KeyAt key_at, const Write write) {
    __shared__ uint64_t largest[THREADS];
    __shared__ uint64_t reached[(DFLASH2_TOP_K_MAX - 1) * DFLASH2_TOP_K_PER_LANE + 1];
    __shared__ uint64_t bound;
    __shared__ int      n_reached;

    const int tid = threadIdx.x;

    uint64_t mine = 0;  // below every key
#pragma unroll
    for (int j = 0; j < DFLASH2_TOP_K_PER_LANE; ++j) {
        const int i = j * THREADS + tid;
        if (i < n) {
            const uint64_t key = key_at(i);
            mine = key > mine ? key : mine;
        }
    }
    largest[tid] = mine;
    if (tid == 0) {
        n_reached = 0;
    }
    __syncthreads();

    int above = 0;
    for (int t = 0; t < THREADS; ++t) {
        above += largest[t] > mine;
    }
    // fewer than k threads have keys: every key reaches
    if (above == k - 1 && mine != 0) {
        bound = mine;
    } else if (tid == 0 && n < k) {
        bound = 1;
    }
    __syncthreads();

#pragma unroll
    for (int j = 0; j < DFLASH2_TOP_K_PER_LANE; ++j) {
        const int i = j * THREADS + tid;
        if (i < n) {
            const uint64_t key = key_at(i);
            if (key >= bound) {
                reached[atomicAdd(&n_reached, 1)] = key;
            }
        }
    }
    __syncthreads();

    for (int i = tid; i < n_reached; i += THREADS) {
        const uint64_t key = reached[i];
        int rank = 0;
        for (int j = 0; j < n_reached; ++j) {
            rank += reached[j] > key;
        }
        if (rank < k) {
            write(rank, key);
        }
    }
}

// Block (p, r) finds the k largest keys of part p of row r. A row of one part is done with that: dst gets the columns.
// A part shorter than k leaves zeros, which lose against every key.
static __global__ void dflash2_top_k_scan(
        const float * src, uint64_t * parts, int * dst, const int n_cols, const int k) {
    const int     part  = blockIdx.x;
    const int     row   = blockIdx.y;
    const int     begin = part * DFLASH2_TOP_K_PART;
    const int     n     = min(n_cols - begin, DFLASH2_TOP_K_PART);
    const float * x     = src + (size_t) row * n_cols + begin;

    const auto key_at = [=](const int i) { return dflash2_key(x[i], begin + i); };

    if (gridDim.x == 1) {
        int * out = dst + (size_t) row * k;
        dflash2_block_top_k<DFLASH2_TOP_K_SCAN>(n, k, key_at, [=](const int rank, const uint64_t key) { out[rank] = dflash2_key_column(key); });
        return;
    }
    uint64_t * out = parts + ((size_t) row * gridDim.x + part) * k;
    for (int i = n + threadIdx.x; i < k; i += DFLASH2_TOP_K_SCAN) {
        out[i] = 0;
    }
    dflash2_block_top_k<DFLASH2_TOP_K_SCAN>(n, k, key_at, [=](const int rank, const uint64_t key) { out[rank] = key; });
}

// Block r merges the parts of row r.
static __global__ void dflash2_top_k_merge(const uint64_t * parts, int * dst, const int n_keys, const int k) {
    const uint64_t * keys = parts + (size_t) blockIdx.x * n_keys;
    int *            out  = dst   + (size_t) blockIdx.x * k;
    dflash2_block_top_k<DFLASH2_TOP_K_MERGE>(n_keys, k,
            [=](const int i) { return keys[i]; },
            [=](const int rank, const uint64_t key) { out[rank] = dflash2_key_column(key); });
}
