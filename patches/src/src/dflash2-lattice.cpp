#include "dflash2-lattice.h"

#include "../ggml/src/dflash2-switch.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

static const char LATTICE[] = "dflash2_lattice_compact";

bool dflash2_lean_graph() {
    static const bool lean = !dflash2_switched_off("DFLASH2_NO_LEAN_GRAPH");
    return lean;
}

int32_t dflash2_lattice_layout_in_use() {
    return dflash2_lean_graph() ? 2 : 1;
}

ggml_tensor * dflash2_lean_conv(llm_graph_context & g, ggml_tensor * hidden, ggml_tensor * delta, ggml_tensor * base, int side) {
    ggml_context * ctx = g.ctx0;
    const int64_t width    = hidden->ne[0];
    const int64_t n_rows   = hidden->ne[1];
    const int64_t n_blocks = g.ubatch.n_seqs_unq;
    const int64_t n_taps   = g.hparams.dflash_conv_kernel_size;
    const int64_t group    = g.hparams.dflash_conv_group_size;
    const int64_t n_groups = width / group;
    GGML_ASSERT(n_blocks > 0 && n_rows % n_blocks == 0);
    const int64_t block    = n_rows / n_blocks;

    // What the convolution reads comes before it, so that a backend finds its nodes in one run and can fuse them.
    ggml_build_forward_expand(g.gf, hidden);
    ggml_build_forward_expand(g.gf, delta);

    const size_t f = sizeof(float);
    ggml_tensor * delta_side = ggml_view_4d(ctx, delta, 1, n_groups, n_taps, n_rows,
            f, f * n_groups, delta->nb[1], f * n_groups * n_taps * side);
    ggml_tensor * base_side  = ggml_view_4d(ctx, base, group, n_groups, n_taps, 1,
            f * group, base->nb[1], base->nb[2], base->nb[2] * side);
    ggml_tensor * weights    = ggml_add(ctx,
            ggml_repeat_4d(ctx, delta_side, group, n_groups, n_taps, n_rows), base_side);

    ggml_tensor * x = ggml_reshape_3d(ctx, hidden, width, block, n_blocks);
    const size_t row = f * width * n_taps;

    ggml_tensor * sum = nullptr;
    for (int64_t tap = 0; tap < std::min(n_taps, block); ++tap) {
        // The first rows of a block have nothing `tap` rows before them.
        ggml_tensor * weight = ggml_view_3d(ctx, weights, width, block - tap, n_blocks,
                row, row * block, row * tap + f * width * tap);
        ggml_tensor * value  = tap == 0 ? x : ggml_view_3d(ctx, x, width, block - tap, n_blocks, x->nb[1], x->nb[2], 0);
        ggml_tensor * term   = ggml_mul(ctx, weight, value);
        sum = tap == 0 ? term : ggml_acc(ctx, sum, term, sum->nb[1], sum->nb[2], sum->nb[3], tap * sum->nb[1]);
    }
    ggml_build_forward_expand(g.gf, sum);
    return ggml_reshape_2d(ctx, sum, width, n_rows);
}

// `ids` [K, rows, blocks] with `first` [1, 1, blocks] as element 0 of row 0.
static ggml_tensor * put_first(llm_graph_context & g, ggml_tensor * ids, ggml_tensor * first) {
    ggml_tensor * in_place = ggml_set_inplace(g.ctx0, ids, first, ids->nb[1], ids->nb[2], ids->nb[3], 0);
    for (int i = 0; i < ggml_backend_sched_get_n_backends(g.sched); ++i) {
        // Another backend would have to write into the memory of the one that lacks the operation.
        if (!ggml_backend_supports_op(ggml_backend_sched_get_backend(g.sched, i), in_place)) {
            return ggml_set(g.ctx0, ids, first, ids->nb[1], ids->nb[2], ids->nb[3], 0);
        }
    }
    return in_place;
}

void dflash2_lean_selector(llm_graph_context & g, const llama_model & model, ggml_tensor * tokens) {
    ggml_context * ctx = g.ctx0;
    ggml_tensor * logits = g.res->t_logits;
    const int64_t n_rows   = g.n_tokens;
    const int64_t n_blocks = g.ubatch.n_seqs_unq;
    const int64_t top_k    = g.hparams.dflash_selector_top_k;
    const int64_t rank     = g.hparams.dflash_selector_rank;
    GGML_ASSERT(n_blocks > 0 && n_rows % n_blocks == 0 && logits->ne[1] == n_rows);
    const int64_t block    = n_rows / n_blocks;
    const int64_t n_scored = std::min<int64_t>(block, g.hparams.dflash_block_size) - 1;
    if (n_scored < 1) {
        return;
    }

    // A view of the rows `from`... of each block, of a tensor that has `n` columns of `ne0` for every row.
    const auto rows_of = [&](ggml_tensor * t, int64_t ne0, int64_t n, int64_t from) {
        const size_t column = ggml_row_size(t->type, ne0);
        return ggml_view_4d(ctx, t, ne0, n, n_scored, n_blocks, column, column * n, column * n * block, column * n * from);
    };

    ggml_tensor * gate = g.build_lora_mm(model.dflash_selector_hidden, g.res->t_embd);
    ggml_build_forward_expand(g.gf, gate);

    ggml_tensor * candidates = ggml_top_k(ctx, logits, top_k);
    ggml_tensor * unary      = ggml_get_rows(ctx, ggml_reshape_3d(ctx, logits, 1, logits->ne[0], n_rows), candidates);
    ggml_build_forward_expand(g.gf, unary);

    // Row i is scored after the candidates of row i - 1; the anchor takes the place of row 0's first one, and nobody
    // asks for the other candidates of row 0.
    ggml_tensor * anchors = ggml_view_3d(ctx, tokens, 1, 1, n_blocks, tokens->nb[0], tokens->nb[0] * block, 0);
    if (n_blocks > 1) {
        anchors = ggml_cont(ctx, anchors);
    }
    ggml_tensor * predecessors = put_first(g, ggml_reshape_3d(ctx, candidates, top_k, block, n_blocks), anchors);

    const auto embed = [&](ggml_tensor * table, ggml_tensor * ids) {
        return ggml_get_rows(ctx, table, ggml_reshape_1d(ctx, ids, top_k * n_rows));
    };
    ggml_tensor * after  = embed(model.dflash_selector_next, candidates);
    ggml_tensor * before = embed(model.dflash_selector_prev, predecessors);
    ggml_tensor * gated  = ggml_mul(ctx, rows_of(before, rank, top_k, 0), rows_of(gate, rank, 1, 1));
    ggml_tensor * scores = ggml_mul_mat(ctx, rows_of(after, rank, top_k, 1), gated);
    scores = ggml_add(ctx, scores, rows_of(unary, top_k, 1, 1));
    ggml_build_forward_expand(g.gf, scores);

    ggml_tensor * ids = ggml_cast(ctx, candidates, GGML_TYPE_F32);
    ids = ggml_view_3d(ctx, ids, top_k, n_scored, n_blocks, ids->nb[1], ids->nb[1] * block, ids->nb[1]);
    ggml_tensor * lattice = ggml_concat(ctx,
            ids, ggml_reshape_3d(ctx, scores, top_k * top_k, n_scored, n_blocks), 0);
    ggml_set_name(lattice, LATTICE);
    g.res->t_h_nextn = lattice;
    ggml_build_forward_expand(g.gf, lattice);
}

bool dflash2_copy_lattice(ggml_backend_t backend, const ggml_tensor * lattice, const llama_ubatch & ubatch, float * rows, uint32_t n_embd) {
    if (std::strcmp(lattice->name, LATTICE) != 0) {
        return false;
    }
    const size_t width    = lattice->nb[1];
    const size_t n_blocks = lattice->ne[2];
    const size_t block    = ubatch.n_tokens / n_blocks;
    for (size_t i = 0; i < n_blocks; ++i) {
        ggml_backend_tensor_get_2d_async(backend, lattice, rows + (i * block + 1) * n_embd, i * lattice->nb[2], width,
                lattice->ne[1], width, n_embd * sizeof(float));
    }
    return true;
}
