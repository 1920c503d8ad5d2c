// Finds the grouped dynamic causal convolution that the lean DFlash 2 graph writes with generic ops:
//   REPEAT(delta) ADD(base) MUL(x), and for every further tap MUL(x one row later) ACC.
// One home for the CPU, CUDA and Metal fusions, so that they cannot disagree about what the pattern means.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstddef>
#include <cstdint>

#define DFLASH2_CONV_MAX_TAPS 4

// out[i, c] = sum over t < n_taps of (delta[i, t, c / group] + base[t, c]) * x[i - t, c]; rows before a block's first are zero.
struct dflash2_conv {
    const ggml_tensor * x;      // [width, block, n_blocks], contiguous
    const ggml_tensor * delta;  // [1, n_groups, taps, rows], a strided view
    const ggml_tensor * base;   // [group, n_groups, taps], taps may be strided
    ggml_tensor *       dst;    // [width, block, n_blocks], contiguous

    int64_t width, group, n_groups;
    int64_t block, n_blocks;
    int64_t n_taps;             // taps that reach into a block: at most its length
    int64_t delta_tap, delta_row, base_tap;  // strides in floats

    int n_after;                // nodes from the pattern's first one (not counted) to its last one
};

// Where a tensor's bytes lie before anything is allocated: the tensor that owns them, and the offset in it.
struct dflash2_place {
    const ggml_tensor * owner;
    size_t              offset;
};

static inline dflash2_place dflash2_place_of(const ggml_tensor * t) {
    return t->view_src ? dflash2_place{ t->view_src, t->view_offs } : dflash2_place{ t, 0 };
}

static inline bool dflash2_is_at(const ggml_tensor * t, const ggml_tensor * of, size_t offset) {
    const dflash2_place a = dflash2_place_of(t);
    const dflash2_place b = dflash2_place_of(of);
    return a.owner == b.owner && a.offset == b.offset + offset;
}

static inline bool dflash2_has_shape(const ggml_tensor * t, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    return t->type == GGML_TYPE_F32 && t->ne[0] == n0 && t->ne[1] == n1 && t->ne[2] == n2 && t->ne[3] == n3;
}

// True if the graph reads `t` exactly `n` times and nobody outside it asked for it.
static inline bool dflash2_is_inner(const ggml_cgraph * gf, const ggml_tensor * t, int n) {
    if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
        return false;
    }
    const size_t pos = ggml_hash_find(&gf->visited_hash_set, t);
    return pos != GGML_HASHSET_FULL && ggml_bitset_get(gf->visited_hash_set.used, pos) && gf->use_counts[pos] == n;
}

// The graph's computing nodes in order; reshapes and views between them are free.
struct dflash2_nodes {
    const ggml_cgraph * gf;
    int                 i;

    // The next one if it is an `op`, else nullptr (and the position stays).
    ggml_tensor * next(ggml_op op) {
        int j = i + 1;
        while (j < gf->n_nodes && ggml_op_is_empty(gf->nodes[j]->op)) {
            ++j;
        }
        if (j >= gf->n_nodes || gf->nodes[j]->op != op || !(gf->nodes[j]->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            return nullptr;
        }
        i = j;
        return gf->nodes[j];
    }
};

// Tap `t` of MUL(w, x): the weights of rows t.. of every block times the rows t earlier.
static inline bool dflash2_is_tap(const ggml_tensor * mul, const ggml_tensor * w, const dflash2_conv & m, int64_t taps, int64_t t) {
    const ggml_tensor * wt  = mul->src[0];
    const ggml_tensor * xt  = mul->src[1];
    const size_t        row = m.width * sizeof(float);

    return dflash2_has_shape(mul, m.width, m.block - t, m.n_blocks, 1) && ggml_is_contiguous(mul) &&
        dflash2_has_shape(wt, m.width, m.block - t, m.n_blocks, 1) && wt->nb[0] == sizeof(float) &&
        (wt->nb[1] == taps * row || m.block - t == 1) && (wt->nb[2] == m.block * taps * row || m.n_blocks == 1) &&
        dflash2_is_at(wt, w, (t * taps + t) * row) &&
        dflash2_has_shape(xt, m.width, m.block - t, m.n_blocks, 1) && xt->nb[0] == sizeof(float) &&
        (xt->nb[1] == row || m.block - t == 1) && (xt->nb[2] == m.block * row || m.n_blocks == 1) &&
        dflash2_is_at(xt, m.x, 0);
}

// True if a convolution starts at node `first`; fills `m`. Looks at shapes, strides and edges only, never at data.
static inline bool dflash2_match_conv(const ggml_cgraph * gf, int first, dflash2_conv & m) {
    const ggml_tensor * repeat = gf->nodes[first];
    if (repeat->op != GGML_OP_REPEAT || !(repeat->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return false;
    }
    dflash2_nodes       nodes = { gf, first };
    const ggml_tensor * add   = nodes.next(GGML_OP_ADD);
    ggml_tensor *       out   = add ? nodes.next(GGML_OP_MUL) : nullptr;
    if (!out || add->src[0] != repeat) {
        return false;
    }

    m.delta = repeat->src[0];
    m.base  = add->src[1];
    m.x     = out->src[1];

    const int64_t taps = m.delta->ne[2];
    const int64_t rows = m.delta->ne[3];
    m.group    = m.base->ne[0];
    m.n_groups = m.base->ne[1];
    m.width    = m.group * m.n_groups;
    m.block    = out->ne[1];
    m.n_blocks = out->ne[2];
    m.n_taps   = taps < m.block ? taps : m.block;

    if (taps < 1 || taps > DFLASH2_CONV_MAX_TAPS || m.block < 1 || m.block * m.n_blocks != rows ||
            !dflash2_has_shape(m.delta, 1, m.n_groups, taps, rows) || m.delta->nb[1] != sizeof(float) ||
            !dflash2_has_shape(m.base, m.group, m.n_groups, taps, 1) || m.base->nb[0] != sizeof(float) ||
            (m.base->nb[1] != m.group * sizeof(float) && m.n_groups > 1) ||
            !dflash2_has_shape(repeat, m.group, m.n_groups, taps, rows) || !ggml_are_same_shape(add, repeat) ||
            add->type != GGML_TYPE_F32 || !ggml_is_contiguous(add) || !ggml_is_contiguous(m.x) ||
            m.delta->nb[2] % sizeof(float) || m.delta->nb[3] % sizeof(float) || m.base->nb[2] % sizeof(float) ||
            !dflash2_is_inner(gf, repeat, 1) || !dflash2_is_inner(gf, add, (int) m.n_taps) ||
            !dflash2_is_tap(out, add, m, taps, 0) || !dflash2_is_inner(gf, out->src[0], 1)) {
        return false;
    }

    const size_t row = m.width * sizeof(float);
    for (int64_t t = 1; t < m.n_taps; ++t) {
        const ggml_tensor * mul = nodes.next(GGML_OP_MUL);
        ggml_tensor *       acc = mul ? nodes.next(GGML_OP_ACC) : nullptr;
        if (!acc || !dflash2_is_tap(mul, add, m, taps, t) || !dflash2_is_inner(gf, mul->src[0], 1) ||
                !dflash2_is_inner(gf, mul, 1) || !dflash2_is_inner(gf, out, 1) || acc->src[0] != out || acc->src[1] != mul ||
                !dflash2_has_shape(acc, m.width, m.block, m.n_blocks, 1) ||
                (size_t) ggml_get_op_params_i32(acc, 0) != row || (size_t) ggml_get_op_params_i32(acc, 1) != m.block * row ||
                (size_t) ggml_get_op_params_i32(acc, 3) != t * row || ggml_get_op_params_i32(acc, 4) != 0) {
            return false;
        }
        out = acc;
    }

    m.dst       = out;
    m.delta_tap = m.delta->nb[2] / sizeof(float);
    m.delta_row = m.delta->nb[3] / sizeof(float);
    m.base_tap  = m.base->nb[2] / sizeof(float);
    m.n_after   = nodes.i - first;
    return true;
}

static inline bool dflash2_overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const char * a0 = (const char *) a->data;
    const char * b0 = (const char *) b->data;
    return a0 < b0 + ggml_nbytes(b) && b0 < a0 + ggml_nbytes(a);
}

// True if writing dst cannot destroy what is still to be read. A kernel that writes a block's rows from the last to
// the first may have dst at x itself (`may_be_x`): a row depends on the same channels of earlier rows only.
static inline bool dflash2_conv_is_safe(const dflash2_conv & m, bool may_be_x) {
    return !dflash2_overlap(m.dst, m.delta) && !dflash2_overlap(m.dst, m.base) &&
        ((may_be_x && m.dst->data == m.x->data) || !dflash2_overlap(m.dst, m.x));
}

// Asks the allocator to keep the inputs of every convolution until its output has its place.
static inline void dflash2_conv_add_alloc_deps(ggml_cgraph * gf, ggml_backend_graph_optimize_params * params) {
    for (int i = 0; i < gf->n_nodes; ++i) {
        dflash2_conv m;
        if (dflash2_match_conv(gf, i, m)) {
            params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(dflash2_place_of(m.x).owner), m.dst);
            params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(dflash2_place_of(m.delta).owner), m.dst);
            i += m.n_after;
        }
    }
}
