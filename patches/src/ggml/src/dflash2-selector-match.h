// Finds the scoring of the path selector's lattice as the lean DFlash 2 graph writes it with generic ops:
//   MUL(predecessors, gate) MUL_MAT(successors) ADD(unary) CPY(ids as floats) CONCAT.
#pragma once

#include "dflash2-conv-match.h"

// lattice row (i, b) = [ids[s] as floats | unary[s] + sum_r predecessor[a][r] * gate[r] * successor[s][r], a-major]
struct dflash2_selector {
    const ggml_tensor * predecessor;  // [rank, k, positions, blocks], strided view
    const ggml_tensor * successor;    // [rank, k, positions, blocks], strided view
    const ggml_tensor * gate;         // [rank, 1, positions, blocks], strided view
    const ggml_tensor * unary;        // [k, 1, positions, blocks], strided view
    const ggml_tensor * ids;          // [k, rows] I32, contiguous
    const ggml_tensor * ids_view;     // [k, positions, blocks] of ids cast to floats: the same offset and strides
    ggml_tensor *       dst;          // [k + k*k, positions, blocks], contiguous

    int n_after;                      // nodes from the pattern's first one (not counted) to its last one
};

static inline bool dflash2_match_selector(const ggml_cgraph * gf, int first, dflash2_selector & m) {
    const ggml_tensor * mul = gf->nodes[first];
    if (mul->op != GGML_OP_MUL || !(mul->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return false;
    }
    dflash2_nodes       nodes  = { gf, first };
    const ggml_tensor * scores = nodes.next(GGML_OP_MUL_MAT);
    const ggml_tensor * add    = scores ? nodes.next(GGML_OP_ADD) : nullptr;
    const ggml_tensor * cast   = add ? nodes.next(GGML_OP_CPY) : nullptr;
    ggml_tensor *       concat = cast ? nodes.next(GGML_OP_CONCAT) : nullptr;
    if (!concat) {
        return false;
    }

    m.predecessor = mul->src[0];
    m.gate        = mul->src[1];
    m.successor   = scores->src[0];
    m.unary       = add->src[1];
    m.ids         = cast->src[0];
    m.ids_view    = concat->src[0];
    m.dst         = concat;
    m.n_after     = nodes.i - first;

    const int64_t rank      = m.predecessor->ne[0];
    const int64_t k         = m.predecessor->ne[1];
    const int64_t positions = m.predecessor->ne[2];
    const int64_t blocks    = m.predecessor->ne[3];
    const size_t  f32       = sizeof(float);

    const bool shapes =
        dflash2_has_shape(m.predecessor, rank, k, positions, blocks) && m.predecessor->nb[0] == f32 &&
        dflash2_has_shape(m.gate,        rank, 1, positions, blocks) && m.gate->nb[0]        == f32 &&
        dflash2_has_shape(m.successor,   rank, k, positions, blocks) && m.successor->nb[0]   == f32 &&
        dflash2_has_shape(m.unary,       k,    1, positions, blocks) && m.unary->nb[0]       == f32 &&
        dflash2_has_shape(m.ids_view,    k, positions, blocks, 1)    && m.ids_view->nb[0]    == f32 &&
        dflash2_has_shape(mul,           rank, k, positions, blocks) &&
        dflash2_has_shape(scores,        k,    k, positions, blocks) &&
        dflash2_has_shape(add,           k,    k, positions, blocks) && ggml_is_contiguous(add) &&
        dflash2_has_shape(concat->src[1], k * k, positions, blocks, 1) &&
        dflash2_has_shape(concat,        k + k * k, positions, blocks, 1) && ggml_is_contiguous(concat) &&
        m.ids->type == GGML_TYPE_I32 && ggml_is_contiguous(m.ids) &&
        cast->type == GGML_TYPE_F32 && ggml_is_contiguous(cast) && ggml_are_same_shape(cast, m.ids);

    const bool edges =
        scores->src[1] == mul && add->src[0] == scores && dflash2_place_of(m.ids_view).owner == cast &&
        dflash2_is_at(concat->src[1], add, 0) && ggml_is_contiguous(concat->src[1]) && ggml_get_op_params_i32(concat, 0) == 0;

    // a cast names its result as its own second source
    const int cast_reads = cast->src[1] == cast ? 2 : 1;

    return shapes && edges && dflash2_is_inner(gf, mul, 1) && dflash2_is_inner(gf, scores, 1) && dflash2_is_inner(gf, add, 1) &&
        dflash2_is_inner(gf, cast, cast_reads) && dflash2_is_inner(gf, m.ids_view, 1) && dflash2_is_inner(gf, concat->src[1], 1);
}

static inline bool dflash2_selector_is_safe(const dflash2_selector & m) {
    return !dflash2_overlap(m.dst, m.predecessor) && !dflash2_overlap(m.dst, m.successor) && !dflash2_overlap(m.dst, m.gate) &&
        !dflash2_overlap(m.dst, m.unary) && !dflash2_overlap(m.dst, m.ids);
}

static inline void dflash2_selector_add_alloc_deps(ggml_cgraph * gf, ggml_backend_graph_optimize_params * params) {
    for (int i = 0; i < gf->n_nodes; ++i) {
        dflash2_selector m;
        if (dflash2_match_selector(gf, i, m)) {
            for (const ggml_tensor * t : { m.predecessor, m.successor, m.gate, m.unary, m.ids }) {
                params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(dflash2_place_of(t).owner), m.dst);
            }
            i += m.n_after;
        }
    }
}
