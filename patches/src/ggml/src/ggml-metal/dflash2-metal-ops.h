// Encoders of the llama-dflash2 kernels; included by ggml-metal-ops.cpp, whose struct ggml_metal_op they use.
#pragma once

#include "dflash2-metal.h"

#include "../dflash2-conv-match.h"

// A pipeline of kernels/dflash2.metal, compiled at its first use.
static ggml_metal_pipeline_with_params ggml_metal_dflash2_pipeline(ggml_metal_library_t lib, const char * name) {
    ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, name);
    return res.pipeline ? res : ggml_metal_library_compile_pipeline(lib, name, name, nullptr);
}

// Encodes the convolution that the fusion table finds at `idx`; returns its nodes, 0 if there is none.
static int ggml_metal_op_dflash2_conv(ggml_metal_op_t ctx, int idx) {
    int n_fuse = 1;
    const ggml_metal_fusion * fusion = ctx->use_fusion() ? ctx->can_fuse(idx, GGML_METAL_FUSION_FULL, &n_fuse) : nullptr;
    if (!fusion || ggml_metal_fusion_get_id(fusion) != GGML_METAL_FUSION_DFLASH2_CONV) {
        return 0;
    }
    dflash2_conv m;
    if (!dflash2_match_conv(ctx->graph(), ctx->graph_idx(idx), m)) {
        return 0;
    }

    // the encode loop checked the first node only, and the kernel reads what the later ones read
    for (int i = 1; i < n_fuse; ++i) {
        if (!ggml_metal_op_concurrency_check(ctx, ctx->node(idx + i))) {
            ggml_metal_op_concurrency_reset(ctx);
            break;
        }
    }

    const ggml_metal_kargs_dflash2_conv args = {
        (int32_t) m.width, (int32_t) m.group, (int32_t) m.block, (int32_t) m.n_taps,
        (int32_t) m.delta_tap, (int32_t) m.delta_row, (int32_t) m.base_tap,
    };
    auto pipeline = ggml_metal_dflash2_pipeline(ctx->lib, "kernel_dflash2_conv_f32");

    ggml_metal_encoder_set_pipeline(ctx->enc, pipeline);
    ggml_metal_encoder_set_bytes   (ctx->enc, (void *) &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(m.x),     1);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(m.delta), 2);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(m.base),  3);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(m.dst),   4);

    const int nth = std::min(256, ggml_metal_pipeline_max_theads_per_threadgroup(pipeline));
    ggml_metal_encoder_dispatch_threadgroups(ctx->enc, (m.width + nth - 1) / nth, m.block * m.n_blocks, 1, nth, 1, 1);

    ctx->count_fusions(fusion);
    ggml_metal_dflash2_counted(DFLASH2_METAL_CONV);
    return n_fuse;
}

// Encodes TOP_K of wide rows in two launches; false (nothing encoded) if the case is not ours.
static bool ggml_metal_op_dflash2_top_k(ggml_metal_op_t ctx, int idx) {
    // as in kernels/dflash2.metal
    constexpr int scan_threads  = 256;
    constexpr int merge_threads = 512;
    constexpr int per_lane      = 16;
    constexpr int part          = scan_threads * per_lane;

    ggml_tensor *       op  = ctx->node(idx);
    const ggml_tensor * src = op->src[0];

    const int64_t n_cols  = src->ne[0];
    const int64_t n_rows  = ggml_nrows(src);
    const int64_t k       = op->ne[0];
    const int64_t n_parts = (n_cols + part - 1) / part;

    // the keys of the parts go behind the result, where the buffer type reserves two indices per column
    const size_t keys_at = GGML_PAD(ggml_nbytes(op), 32);
    if (ggml_metal_dflash2_top_k_off() || n_cols <= 2048 || k > 64 || n_parts * k > merge_threads * per_lane || !ggml_is_contiguous(src) ||
            keys_at + sizeof(uint64_t) * n_rows * n_parts * k > 2 * sizeof(int32_t) * ggml_nelements(src)) {
        return false;
    }
    auto scan  = ggml_metal_dflash2_pipeline(ctx->lib, "kernel_dflash2_top_k_scan_f32");
    auto merge = ggml_metal_dflash2_pipeline(ctx->lib, "kernel_dflash2_top_k_merge_f32");
    if (ggml_metal_pipeline_max_theads_per_threadgroup(scan) < scan_threads ||
            ggml_metal_pipeline_max_theads_per_threadgroup(merge) < merge_threads) {
        return false;
    }

    const ggml_metal_kargs_dflash2_top_k args = { (int32_t) n_cols, (int32_t) n_parts, (int32_t) k };
    const ggml_metal_buffer_id           dst  = ggml_metal_get_buffer_id(op);
    ggml_metal_buffer_id                 keys = dst;
    keys.offs += keys_at;

    ggml_metal_encoder_set_pipeline(ctx->enc, scan);
    ggml_metal_encoder_set_bytes   (ctx->enc, (void *) &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (ctx->enc, ggml_metal_get_buffer_id(src), 1);
    ggml_metal_encoder_set_buffer  (ctx->enc, keys, 2);
    ggml_metal_encoder_dispatch_threadgroups(ctx->enc, n_parts, n_rows, 1, scan_threads, 1, 1);

    ggml_metal_op_concurrency_reset(ctx);

    ggml_metal_encoder_set_pipeline(ctx->enc, merge);
    ggml_metal_encoder_set_bytes   (ctx->enc, (void *) &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (ctx->enc, keys, 1);
    ggml_metal_encoder_set_buffer  (ctx->enc, dst,  2);
    ggml_metal_encoder_dispatch_threadgroups(ctx->enc, n_rows, 1, 1, merge_threads, 1, 1);

    ggml_metal_dflash2_counted(DFLASH2_METAL_TOP_K);
    return true;
}
