// The two graphs of the grouped dynamic causal convolution: the chain that stock llama.cpp builds, and the lean one.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cstdint>

struct conv_shape {
    int64_t group, n_groups, taps, block, n_blocks, side;

    int64_t width() const { return group * n_groups; }
    int64_t rows()  const { return block * n_blocks; }
};

// x [width, rows], delta [2 * taps * n_groups, rows], base [width, taps, 2]; returns [width, rows].
inline ggml_tensor * stock_conv(ggml_context * ctx, ggml_tensor * x, ggml_tensor * delta, ggml_tensor * base, conv_shape s) {
    const int64_t width = s.width();
    ggml_tensor * blocks = ggml_reshape_3d(ctx, x, width, s.block, s.n_blocks);
    ggml_tensor * sides  = ggml_reshape_4d(ctx, delta, s.n_groups, s.taps, 2, s.rows());
    ggml_tensor * side   = ggml_view_3d(ctx, sides, s.n_groups, s.taps, s.rows(), sides->nb[1], sides->nb[3], s.side * sides->nb[2]);

    ggml_tensor * coefficients = ggml_repeat_4d(ctx,
            ggml_reshape_4d(ctx, ggml_cont(ctx, side), 1, s.n_groups, s.taps, s.rows()), s.group, s.n_groups, s.taps, s.rows());
    ggml_tensor * weights = ggml_add(ctx, coefficients, ggml_reshape_4d(ctx,
            ggml_view_1d(ctx, base, width * s.taps, s.side * base->nb[2]), s.group, s.n_groups, s.taps, 1));

    ggml_tensor * sum = nullptr;
    for (int64_t t = 0; t < std::min(s.taps, s.block); ++t) {
        ggml_tensor * values = blocks;
        if (t > 0) {
            values = ggml_pad_ext(ctx, ggml_view_3d(ctx, blocks, width, s.block - t, s.n_blocks, blocks->nb[1], blocks->nb[2], 0),
                    0, 0, t, 0, 0, 0, 0, 0);
        }
        ggml_tensor * weight = ggml_cont(ctx, ggml_view_4d(ctx, weights, s.group, s.n_groups, 1, s.rows(),
                weights->nb[1], weights->nb[2], weights->nb[3], t * weights->nb[2]));
        ggml_tensor * term = ggml_mul(ctx, ggml_reshape_2d(ctx, weight, width, s.rows()), ggml_reshape_2d(ctx, values, width, s.rows()));
        sum = sum ? ggml_add(ctx, sum, term) : term;
    }
    return sum;
}

inline ggml_tensor * lean_conv(ggml_context * ctx, ggml_tensor * x, ggml_tensor * delta, ggml_tensor * base, conv_shape s) {
    const int64_t width = s.width();
    const size_t  row   = width * sizeof(float);
    ggml_tensor * d = ggml_view_4d(ctx, delta, 1, s.n_groups, s.taps, s.rows(),
            sizeof(float), s.n_groups * sizeof(float), delta->nb[1], s.side * s.taps * s.n_groups * sizeof(float));
    ggml_tensor * b = ggml_view_4d(ctx, base, s.group, s.n_groups, s.taps, 1,
            s.group * sizeof(float), base->nb[1], base->nb[2], s.side * base->nb[2]);
    ggml_tensor * w  = ggml_add(ctx, ggml_repeat_4d(ctx, d, s.group, s.n_groups, s.taps, s.rows()), b);
    ggml_tensor * x3 = ggml_reshape_3d(ctx, x, width, s.block, s.n_blocks);

    ggml_tensor * out = ggml_mul(ctx,
            ggml_view_3d(ctx, w, width, s.block, s.n_blocks, s.taps * row, s.block * s.taps * row, 0), x3);
    for (int64_t t = 1; t < std::min(s.taps, s.block); ++t) {
        ggml_tensor * wt = ggml_view_3d(ctx, w, width, s.block - t, s.n_blocks, s.taps * row, s.block * s.taps * row, (t + t * s.taps) * row);
        ggml_tensor * xt = ggml_view_3d(ctx, x3, width, s.block - t, s.n_blocks, x3->nb[1], x3->nb[2], 0);
        out = ggml_acc(ctx, out, ggml_mul(ctx, wt, xt), out->nb[1], out->nb[2], out->nb[3], t * out->nb[1]);
    }
    return ggml_reshape_2d(ctx, out, width, s.rows());
}
