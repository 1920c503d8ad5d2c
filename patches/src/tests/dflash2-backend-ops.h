// Cases of test-backend-ops for the kernels of llama-dflash2; included by test-backend-ops.cpp after its test_case.
#pragma once

// The convolution as the lean graph writes it; a backend that fuses it runs one kernel, any other the ops.
struct test_dflash2_conv : public test_case {
    const int64_t group, n_groups, taps, block, n_blocks, side;

    test_dflash2_conv(int64_t group, int64_t n_groups, int64_t taps, int64_t block, int64_t n_blocks, int64_t side)
        : group(group), n_groups(n_groups), taps(taps), block(block), n_blocks(n_blocks), side(side) {}

    std::string op_desc(ggml_tensor *) override { return "DFLASH2_CONV"; }
    std::string vars() override { return VARS_TO_STR6(group, n_groups, taps, block, n_blocks, side); }
    bool run_whole_graph() override { return true; }

    ggml_tensor * build_graph(ggml_context * ctx) override {
        const int64_t width = group * n_groups;
        const int64_t rows  = block * n_blocks;
        const size_t  row   = width * sizeof(float);

        ggml_tensor * x     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, rows);
        ggml_tensor * delta = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2 * taps * n_groups, rows);
        ggml_tensor * base  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, width, taps, 2);

        ggml_tensor * d = ggml_view_4d(ctx, delta, 1, n_groups, taps, rows,
                sizeof(float), n_groups * sizeof(float), delta->nb[1], side * taps * n_groups * sizeof(float));
        ggml_tensor * b = ggml_view_4d(ctx, base, group, n_groups, taps, 1,
                group * sizeof(float), base->nb[1], base->nb[2], side * base->nb[2]);
        ggml_tensor * w   = ggml_add(ctx, ggml_repeat_4d(ctx, d, group, n_groups, taps, rows), b);
        ggml_tensor * x3  = ggml_reshape_3d(ctx, x, width, block, n_blocks);
        ggml_tensor * out = ggml_mul(ctx, ggml_view_3d(ctx, w, width, block, n_blocks, taps * row, block * taps * row, 0), x3);
        for (int64_t t = 1; t < std::min(taps, block); ++t) {
            ggml_tensor * wt = ggml_view_3d(ctx, w, width, block - t, n_blocks, taps * row, block * taps * row, (t + t * taps) * row);
            ggml_tensor * xt = ggml_view_3d(ctx, x3, width, block - t, n_blocks, x3->nb[1], x3->nb[2], 0);
            out = ggml_acc(ctx, out, ggml_mul(ctx, wt, xt), out->nb[1], out->nb[2], out->nb[3], t * out->nb[1]);
        }
        return out;
    }
};

// The scores of the path selector as the lean graph writes them, from rows that are gathered already.
struct test_dflash2_selector : public test_case {
    const int64_t k, rank, block, n_blocks;

    test_dflash2_selector(int64_t k, int64_t rank, int64_t block, int64_t n_blocks)
        : k(k), rank(rank), block(block), n_blocks(n_blocks) {}

    std::string op_desc(ggml_tensor *) override { return "DFLASH2_SELECTOR"; }
    std::string vars() override { return VARS_TO_STR4(k, rank, block, n_blocks); }
    bool run_whole_graph() override { return true; }
    double max_nmse_err() override { return 1e-6; }  // sums of products in another order

    ggml_tensor * build_graph(ggml_context * ctx) override {
        const int64_t n = block - 1;

        ggml_tensor * pred  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, rank, k, block, n_blocks);
        ggml_tensor * succ  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, rank, k, block, n_blocks);
        ggml_tensor * gate  = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, rank, 1, block, n_blocks);
        ggml_tensor * unary = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, k, 1, block, n_blocks);
        ggml_tensor * ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, k, block * n_blocks);
        ggml_set_name(ids, "ids");

        const auto rows_from = [&](ggml_tensor * t, int64_t first) {
            return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, n_blocks, t->nb[1], t->nb[2], t->nb[3], first * t->nb[2]);
        };
        ggml_tensor * gated  = ggml_mul(ctx, rows_from(pred, 0), rows_from(gate, 1));
        ggml_tensor * scores = ggml_add(ctx, ggml_mul_mat(ctx, rows_from(succ, 1), gated), rows_from(unary, 1));
        ggml_tensor * cast   = ggml_cast(ctx, ids, GGML_TYPE_F32);
        ggml_tensor * shown  = ggml_view_3d(ctx, cast, k, n, n_blocks, cast->nb[1], block * cast->nb[1], cast->nb[1]);

        // as in the model's graph, the scores come before the cast; the perf mode makes its graph later
        if (mode == MODE_TEST) {
            ggml_build_forward_expand(gf, scores);
        }
        return ggml_concat(ctx, shown, ggml_reshape_3d(ctx, scores, k * k, n, n_blocks), 0);
    }

    void initialize_tensors(ggml_context * ctx) override {
        std::mt19937 random(1);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (strcmp(ggml_get_name(t), "ids") == 0) {
                std::vector<int32_t> values(ggml_nelements(t));
                for (int32_t & v : values) {
                    v = random() % 248320;
                }
                ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
            } else if (t->op == GGML_OP_NONE) {
                init_tensor_uniform(t);
            }
        }
    }
};

static void add_dflash2_cases(std::vector<std::unique_ptr<test_case>> & cases, bool perf) {
    const auto conv     = [&](auto... sizes) { cases.emplace_back(new test_dflash2_conv(sizes...)); };
    const auto selector = [&](auto... sizes) { cases.emplace_back(new test_dflash2_selector(sizes...)); };
    const auto top_k    = [&](int64_t cols, int64_t rows, int k, bool ties) {
        cases.emplace_back(new test_top_k(GGML_TYPE_F32, { cols, rows, 1, 1 }, k, ties));
    };

    // the geometry of Qwen3.8-27B-DFlash2
    conv(16, 320, 2, 8, 1, 0);
    selector(16, 256, 8, 1);
    top_k(248320, 8, 16, false);
    if (perf) {
        return;
    }
    conv(16, 320, 2, 8, 1, 1);
    conv(16, 416, 2, 16, 4, 1);
    conv(7, 5, 3, 6, 2, 0);
    conv(1, 33, 4, 3, 4, 1);
    conv(300, 2, 4, 4, 1, 0);
    conv(16, 6, 2, 1, 3, 1);
    conv(5, 3, 1, 8, 2, 0);
    selector(16, 256, 16, 3);
    selector(5, 33, 3, 2);
    selector(1, 7, 2, 1);
    for (int k : { 1, 7, 16, 64 }) {
        for (bool ties : { false, true }) {
            top_k(1025, 2, k, ties);
            top_k(4097, 3, k, ties);
            top_k(300000, 2, k, ties);
        }
    }
}
