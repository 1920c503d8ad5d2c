// Device code only: a host shim compiles this file too.
#pragma once

#include <stdint.h>

#define DFLASH2_SELECTOR_THREADS 256
#define DFLASH2_SELECTOR_WARP    32

// Strides in elements of the tensors that the lattice of one block position is made of.
struct dflash2_selector_args {
    int     n_candidates, rank, n_positions;
    int64_t pred_candidate, succ_candidate;            // from one candidate's vector to the next
    int64_t pred_position, succ_position, gate_position, unary_position, id_position;
    int64_t pred_block, succ_block, gate_block, unary_block, id_block;
};

// Block (i, b) writes row i of block b: the candidates' ids as floats, then for every predecessor a and successor s
//   unary[s] + sum over r of predecessor[a][r] * gate[r] * successor[s][r].
// A warp takes one pair at a time: no shared memory, any rank.
static __global__ void dflash2_selector_kernel(
        const float * predecessor, const float * successor, const float * gate, const float * unary, const int * ids,
        float * lattice, const dflash2_selector_args s) {
    const int i    = blockIdx.x;
    const int b    = blockIdx.y;
    const int lane = threadIdx.x % DFLASH2_SELECTOR_WARP;
    const int warp = threadIdx.x / DFLASH2_SELECTOR_WARP;
    const int k    = s.n_candidates;

    const float * p   = predecessor + i * s.pred_position  + b * s.pred_block;
    const float * q   = successor   + i * s.succ_position  + b * s.succ_block;
    const float * g   = gate        + i * s.gate_position  + b * s.gate_block;
    const float * u   = unary       + i * s.unary_position + b * s.unary_block;
    const int *   id  = ids         + i * s.id_position    + b * s.id_block;
    float *       out = lattice     + (size_t) (b * s.n_positions + i) * (k + k * k);

    for (int c = threadIdx.x; c < k; c += DFLASH2_SELECTOR_THREADS) {
        out[c] = (float) id[c];
    }
    for (int pair = warp; pair < k * k; pair += DFLASH2_SELECTOR_THREADS / DFLASH2_SELECTOR_WARP) {
        const float * pa  = p + (pair / k) * s.pred_candidate;
        const float * qs  = q + (pair % k) * s.succ_candidate;
        float         sum = 0.0f;
        for (int r = lane; r < s.rank; r += DFLASH2_SELECTOR_WARP) {
            sum += pa[r] * g[r] * qs[r];
        }
#pragma unroll
        for (int offset = DFLASH2_SELECTOR_WARP / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, offset, DFLASH2_SELECTOR_WARP);
        }
        if (lane == 0) {
            out[k + pair] = sum + u[pair % k];
        }
    }
}
