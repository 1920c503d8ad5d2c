// The CPU kernels beside the ops of the installed llama.cpp, as plain functions for tests.
// Compiled with -Dggml_barrier=test_barrier: the kernels' threads are this file's, not a threadpool of ggml.

#include "conv_graphs.h"

#include "../../patches/src/ggml/src/ggml-cpu/dflash2-cpu.h"
#include "../../patches/src/ggml/src/dflash2-selector-match.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"

#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct ggml_threadpool {
    explicit ggml_threadpool(int n) : n(n) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const int now = round;
        if (++waiting == n) {
            waiting = 0;
            ++round;
            all.notify_all();
        } else {
            all.wait(lock, [&] { return round != now; });
        }
    }

    int                     n;
    int                     waiting = 0;
    int                     round   = 0;
    std::mutex              mutex;
    std::condition_variable all;
};

extern "C" void test_barrier(ggml_threadpool * pool) { pool->wait(); }

namespace {

using context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;

context make_context(size_t bytes) { return { ggml_init({ bytes, nullptr, false }), ggml_free }; }

void on_threads(int n, const std::function<void(const ggml_compute_params &)> & work, std::vector<char> & scratch) {
    ggml_threadpool          pool(n);
    std::vector<std::thread> threads;
    for (int i = 0; i < n; ++i) {
        threads.emplace_back([&, i] { work(ggml_compute_params{ i, n, scratch.size(), scratch.data(), &pool, false }); });
    }
    for (auto & t : threads) {
        t.join();
    }
}

struct conv {
    context       ctx;
    ggml_tensor * x;
    ggml_tensor * delta;
    ggml_tensor * base;
    ggml_cgraph * gf;

    conv(conv_shape s, bool lean, const float * x_data, const float * delta_data, const float * base_data)
            : ctx(make_context((4 << 20) + 64 * sizeof(float) * s.width() * s.rows() * (s.taps + 1))) {
        x     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, s.width(), s.rows());
        delta = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 2 * s.taps * s.n_groups, s.rows());
        base  = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, s.width(), s.taps, 2);
        memcpy(x->data, x_data, ggml_nbytes(x));
        memcpy(delta->data, delta_data, ggml_nbytes(delta));
        memcpy(base->data, base_data, ggml_nbytes(base));
        gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, (lean ? lean_conv : stock_conv)(ctx.get(), x, delta, base, s));
    }

    ggml_tensor * out() { return ggml_graph_node(gf, -1); }

    int first_repeat() const {
        int i = 0;
        while (gf->nodes[i]->op != GGML_OP_REPEAT) {
            ++i;
        }
        return i;
    }
};

}  // namespace

extern "C" {

// What the installed llama.cpp computes for the stock chain (lean = 0) or the lean graph (lean = 1).
void graph_conv(conv_shape s, int lean, const float * x, const float * delta, const float * base, float * out) {
    conv c(s, lean, x, delta, base);
    ggml_graph_compute_with_ctx(c.ctx.get(), c.gf, 2);
    memcpy(out, c.out()->data, ggml_nbytes(c.out()));
}

// The fused kernel. place: 0 output apart, 1 output at x, 2 output one row into x, 3 output over delta.
// Returns how many nodes it did after the first one; the output is poisoned with NaN before.
int fused_conv(conv_shape s, int n_threads, int place, const float * x, const float * delta, const float * base, float * out) {
    conv c(s, true, x, delta, base);
    dflash2_conv m;
    if (!dflash2_match_conv(c.gf, c.first_repeat(), m)) {
        return -1;
    }
    std::vector<float> room(s.width() * (s.rows() + 1) + ggml_nelements(c.delta));
    if (place == 1 || place == 2) {
        memcpy(room.data(), x, ggml_nbytes(c.x));
        for (ggml_tensor * t = ggml_get_first_tensor(c.ctx.get()); t; t = ggml_get_next_tensor(c.ctx.get(), t)) {
            if (t == c.x || t->view_src == c.x) {
                t->data = (char *) room.data() + t->view_offs;
            }
        }
        m.dst->data = room.data() + (place == 2 ? s.width() : 0);
    } else if (place == 3) {
        m.dst->data = c.delta->data;
    } else {
        std::fill_n((float *) m.dst->data, ggml_nelements(m.dst), __builtin_nanf(""));
    }

    std::vector<char> scratch;
    std::vector<int>  done(n_threads);
    on_threads(n_threads, [&](const ggml_compute_params & p) { done[p.ith] = ggml_cpu_dflash2_try_conv(&p, c.gf, c.first_repeat()); }, scratch);
    for (int d : done) {
        if (d != done[0]) {
            return -2;
        }
    }
    memcpy(out, m.dst->data, ggml_nbytes(m.dst));
    return done[0];
}

// A lean graph with one thing changed: 0 nothing, 1 an inner result is an output, 2 an inner result has a second reader,
// 3 the last tap reads another x, 4 the rows of x are shifted by none, 5 base is F16. True if the pattern is still found.
int matches_changed(conv_shape s, int change) {
    std::vector<float> zeros(s.width() * s.rows() * (2 * s.taps + 2) + 2 * s.taps * s.width());
    conv c(s, true, zeros.data(), zeros.data(), zeros.data());
    const auto find = [&](ggml_op op, int skip) {
        for (int i = 0; i < c.gf->n_nodes; ++i) {
            if (c.gf->nodes[i]->op == op && skip-- == 0) {
                return c.gf->nodes[i];
            }
        }
        return (ggml_tensor *) nullptr;
    };
    ggml_tensor * other = ggml_new_tensor_2d(c.ctx.get(), GGML_TYPE_F32, s.width(), s.rows());
    switch (change) {
        case 1: find(GGML_OP_MUL, 1)->flags |= GGML_TENSOR_FLAG_OUTPUT; break;
        case 2: ggml_build_forward_expand(c.gf, ggml_neg(c.ctx.get(), find(GGML_OP_ADD, 0))); break;
        case 3: find(GGML_OP_MUL, 1)->src[1]->view_src = other; break;
        case 4: find(GGML_OP_ACC, 0)->op_params[3] = 0; break;
        case 5: find(GGML_OP_ADD, 0)->src[1]->type = GGML_TYPE_F16; break;
        default: break;
    }
    dflash2_conv m;
    return dflash2_match_conv(c.gf, c.first_repeat(), m);
}

// The selector's scores from gathered rows: as the installed llama.cpp computes the lean graph (`by_graph`), and from
// nothing but what the match says, read as the fused kernels read it (`by_match`). False if the pattern is not found.
// change: 0 nothing, 1 the scores have a second reader, 2 the ids of other rows are shown.
int selector_by_match(int k, int rank, int block, int n_blocks, int change, const float * predecessor, const float * successor,
        const float * gate, const float * unary, const int32_t * ids, float * by_graph, float * by_match) {
    context       holder = make_context(64 << 20);
    ggml_context * ctx   = holder.get();
    const int64_t n      = block - 1;
    const auto input = [&](ggml_type type, const void * data, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
        ggml_tensor * t = ggml_new_tensor_4d(ctx, type, n0, n1, n2, n3);
        memcpy(t->data, data, ggml_nbytes(t));
        return t;
    };
    const auto rows_from = [&](ggml_tensor * t, int64_t first) {
        return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, n_blocks, t->nb[1], t->nb[2], t->nb[3], first * t->nb[2]);
    };
    ggml_tensor * p = input(GGML_TYPE_F32, predecessor, rank, k, block, n_blocks);
    ggml_tensor * q = input(GGML_TYPE_F32, successor, rank, k, block, n_blocks);
    ggml_tensor * g = input(GGML_TYPE_F32, gate, rank, 1, block, n_blocks);
    ggml_tensor * u = input(GGML_TYPE_F32, unary, k, 1, block, n_blocks);
    ggml_tensor * c = input(GGML_TYPE_I32, ids, k, block * n_blocks, 1, 1);

    ggml_cgraph * gf     = ggml_new_graph(ctx);
    ggml_tensor * gated  = ggml_mul(ctx, rows_from(p, 0), rows_from(g, 1));
    ggml_tensor * scores = ggml_add(ctx, ggml_mul_mat(ctx, rows_from(q, 1), gated), rows_from(u, 1));
    ggml_build_forward_expand(gf, scores);
    ggml_tensor * cast  = ggml_cast(ctx, c, GGML_TYPE_F32);
    ggml_tensor * shown = ggml_view_3d(ctx, cast, k, n, n_blocks, cast->nb[1], block * cast->nb[1], change == 2 ? 0 : cast->nb[1]);
    ggml_build_forward_expand(gf, ggml_concat(ctx, shown, ggml_reshape_3d(ctx, scores, k * k, n, n_blocks), 0));
    if (change == 1) {
        ggml_build_forward_expand(gf, ggml_neg(ctx, scores));
    }

    int first = 0;
    while (gf->nodes[first]->op != GGML_OP_MUL) {
        ++first;
    }
    dflash2_selector m;
    if (!dflash2_match_selector(gf, first, m)) {
        return 0;
    }
    ggml_graph_compute_with_ctx(ctx, gf, 2);
    memcpy(by_graph, m.dst->data, ggml_nbytes(m.dst));

    const auto at = [](const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
        return *(const float *) ((const char *) t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
    };
    for (int64_t b = 0; b < n_blocks; ++b) {
        for (int64_t i = 0; i < n; ++i) {
            const char * id = (const char *) m.ids->data + m.ids_view->view_offs + i * m.ids_view->nb[1] + b * m.ids_view->nb[2];
            for (int s = 0; s < k; ++s) {
                *by_match++ = (float) ((const int32_t *) id)[s];
            }
            for (int pair = 0; pair < k * k; ++pair) {
                float sum = 0;
                for (int r = 0; r < rank; ++r) {
                    sum += at(m.predecessor, r, pair / k, i, b) * at(m.gate, r, 0, i, b) * at(m.successor, r, pair % k, i, b);
                }
                *by_match++ = sum + at(m.unary, pair % k, 0, i, b);
            }
        }
    }
    return m.n_after;
}

// TOP_K by the installed llama.cpp.
void graph_top_k(const float * src, int64_t n_cols, int64_t n_rows, int k, int32_t * out) {
    context       ctx = make_context((4 << 20) + sizeof(float) * n_rows * (n_cols + k));
    ggml_tensor * a   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_cols, n_rows);
    memcpy(a->data, src, ggml_nbytes(a));
    ggml_tensor * t  = ggml_top_k(ctx.get(), a, k);
    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, t);
    std::vector<uint8_t> work;
    ggml_cplan plan = ggml_graph_plan(gf, 1, nullptr);
    work.resize(plan.work_size);
    plan.work_data = work.data();
    ggml_graph_compute(gf, &plan);
    memcpy(out, t->data, ggml_nbytes(t));
}

// TOP_K by the kernel on `n_threads` threads; 0 if it leaves the case to the stock op. The output is poisoned before.
int fused_top_k(const float * src, int64_t n_cols, int64_t n_rows, int k, int n_threads, int32_t * out) {
    context       ctx = make_context((4 << 20) + sizeof(float) * n_rows * (n_cols + k));
    ggml_tensor * a   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_cols, n_rows);
    ggml_tensor * t   = ggml_top_k(ctx.get(), a, k);
    memcpy(a->data, src, ggml_nbytes(a));
    memset(t->data, 0xff, ggml_nbytes(t));
    std::vector<char> scratch((n_cols + 64) * sizeof(int32_t) * n_threads);  // as ggml_graph_plan reserves it
    std::vector<int>  done(n_threads);
    on_threads(n_threads, [&](const ggml_compute_params & p) { done[p.ith] = ggml_cpu_dflash2_top_k(&p, t); }, scratch);
    memcpy(out, t->data, ggml_nbytes(t));
    return done[0];
}

}  // extern "C"
