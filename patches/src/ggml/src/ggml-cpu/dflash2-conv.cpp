// The grouped dynamic causal convolution in one pass over x, bit-equal to the ops it replaces.

#include "dflash2-cpu.h"

#include "../dflash2-conv-match.h"
#include "../dflash2-switch.h"
#include "ggml-cpu-impl.h"

#include <algorithm>
#include <atomic>

// The ops round every product before they add it: no fused multiply-add here.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

constexpr int64_t CHUNK = 256;  // channels at a time: base and the rows of x stay in the first cache

std::atomic<uint64_t> n_conv{0};

bool switched_off() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_CONV");
    return off;
}

// One row's groups [g0, g1): `taps` of the taps reach into the block. GROUP is 0 where the group size is not known.
template <int TAPS, int GROUP>
void row_groups(const dflash2_conv & m, const float * x, const float * delta, float * dst, int64_t g0, int64_t g1) {
    const float * base  = (const float *) m.base->data;
    const int64_t group = GROUP ? GROUP : m.group;

    for (int64_t g = g0; g < g1; ++g) {
        float d[TAPS];
        for (int t = 0; t < TAPS; ++t) {
            d[t] = delta[t * m.delta_tap + g];
        }
        const int64_t c0 = g * group;
        for (int64_t c = c0; c < c0 + group; ++c) {
            float sum = (d[0] + base[c]) * x[c];
            for (int t = 1; t < TAPS; ++t) {
                sum += (d[t] + base[t * m.base_tap + c]) * x[c - t * m.width];
            }
            dst[c] = sum;
        }
    }
}

template <int TAPS>
void row(const dflash2_conv & m, const float * x, const float * delta, float * dst, int64_t g0, int64_t g1) {
    if (m.group == 16) {
        row_groups<TAPS, 16>(m, x, delta, dst, g0, g1);
    } else {
        row_groups<TAPS, 0>(m, x, delta, dst, g0, g1);
    }
}

// Rows from the last to the first: a row reads earlier ones only, so dst may be x.
void block_groups(const dflash2_conv & m, int64_t b, int64_t g0, int64_t g1) {
    for (int64_t i = m.block - 1; i >= 0; --i) {
        const int64_t r     = b * m.block + i;
        const float * x     = (const float *) m.x->data + r * m.width;
        const float * delta = (const float *) m.delta->data + r * m.delta_row;
        float *       dst   = (float *) m.dst->data + r * m.width;

        switch (std::min(m.n_taps, i + 1)) {
            case 1:  row<1>(m, x, delta, dst, g0, g1); break;
            case 2:  row<2>(m, x, delta, dst, g0, g1); break;
            case 3:  row<3>(m, x, delta, dst, g0, g1); break;
            default: row<4>(m, x, delta, dst, g0, g1); break;
        }
    }
}

}  // namespace

int ggml_cpu_dflash2_try_conv(const ggml_compute_params * params, const ggml_cgraph * cgraph, int node_n) {
    dflash2_conv m;
    if (cgraph->nodes[node_n]->op != GGML_OP_REPEAT || switched_off() || !dflash2_match_conv(cgraph, node_n, m) ||
            !dflash2_conv_is_safe(m, true)) {
        return 0;
    }

    const int64_t per_chunk = std::max<int64_t>(1, CHUNK / m.group);
    const int64_t n_chunks  = (m.n_groups + per_chunk - 1) / per_chunk;
    const int64_t n_units   = n_chunks * m.n_blocks;
    const int64_t per_task  = (n_units + params->nth - 1) / params->nth;
    const int64_t end       = std::min(n_units, per_task * (params->ith + 1));

    for (int64_t u = per_task * params->ith; u < end; ++u) {
        const int64_t g0 = (u % n_chunks) * per_chunk;
        block_groups(m, u / n_chunks, g0, std::min(g0 + per_chunk, m.n_groups));
    }

    if (params->ith == 0) {
        n_conv.fetch_add(1, std::memory_order_relaxed);
    }
    return m.n_after;
}

void ggml_cpu_dflash2_graph_optimize(
        ggml_backend_t backend, ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params) {
    GGML_UNUSED(backend);
    if (!switched_off()) {
        dflash2_conv_add_alloc_deps(cgraph, params);
    }
}

uint64_t ggml_cpu_dflash2_conv_count(void) {
    return n_conv.load(std::memory_order_relaxed);
}
