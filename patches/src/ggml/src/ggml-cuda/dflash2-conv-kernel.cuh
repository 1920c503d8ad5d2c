// Device code only: a host shim compiles this file too.
#pragma once

// One thread per channel of one row. Products are rounded before they are added, as by the ops this replaces.
template <int TAPS>
static __global__ void dflash2_conv_kernel(
        const float * x, const float * delta, const float * base, float * dst,
        const int width, const int group, const int block, const int n_taps,
        const int delta_tap, const int delta_row, const int base_tap) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    const int r = blockIdx.y;
    if (c >= width) {
        return;
    }
    const int reach = r % block;  // rows of this block before this one
    const float * xr = x + (size_t) r * width + c;
    const float * dr = delta + (size_t) r * delta_row + c / group;

    float sum = __fmul_rn(__fadd_rn(dr[0], base[c]), xr[0]);
#pragma unroll
    for (int t = 1; t < TAPS; ++t) {
        if (t < n_taps && t <= reach) {
            const float weight = __fadd_rn(dr[t * delta_tap], base[t * base_tap + c]);
            sum = __fadd_rn(sum, __fmul_rn(weight, xr[-(t * width)]));
        }
    }
    dst[(size_t) r * width + c] = sum;
}
