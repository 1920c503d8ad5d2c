// Times the convolution, TOP_K and (lean) the selector of one draft pass on a device of whichever ggml the loader finds.
//   patches_ops stock|lean THREADS REPEATS [DEVICE] -> one JSON object: microseconds per op (median), runs of each fused
//   kernel. The device is the CPU unless named. On a GPU every op stands 20 times in its graph: one op alone would be
//   the launch and the wait for it.

#include "../tests/kernels/conv_graphs.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

// Qwen3.8-27B-DFlash2: hidden 5120 in groups of 16, 2 taps, a block of 8, vocabulary 248320, 16 candidates
constexpr conv_shape CONV   = { 16, 320, 2, 8, 1, 0 };
constexpr int64_t    VOCAB  = 248320;
constexpr int        TOP_K  = 16;
constexpr int64_t    RANK   = 256;
constexpr int        N_CONV = 20;

struct machine {
    ggml_backend_dev_t device;
    int                n_threads;
    int                repeats;

    bool is_cpu() const { return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU; }
    int  n_copies() const { return is_cpu() ? 1 : N_CONV; }
};

// Random numbers, the same ones every PERIOD of them: big tensors need not be different everywhere.
void fill(ggml_tensor * t, float mean, float deviation) {
    constexpr size_t                PERIOD = 1 << 21;
    std::mt19937                    random(1);
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float>              values(std::min<size_t>(ggml_nelements(t), PERIOD));
    for (float & v : values) {
        v = normal(random);
    }
    const size_t total = ggml_nbytes(t);
    for (size_t at = 0; at < total; at += PERIOD * sizeof(float)) {
        ggml_backend_tensor_set(t, values.data(), at, std::min(PERIOD * sizeof(float), total - at));
    }
}

struct graph {
    ggml_backend_t             backend;
    ggml_backend_sched_t       sched;
    ggml_context *             ctx;
    ggml_cgraph *              gf;
    std::vector<ggml_tensor *> inputs;

    ggml_tensor * input(ggml_tensor * t) {
        ggml_set_input(t);
        ggml_set_output(t);  // kept over all runs of the graph
        ggml_backend_sched_set_tensor_backend(sched, t, backend);
        inputs.push_back(t);
        ggml_build_forward_expand(gf, t);
        return t;
    }
};

using build_fn = std::function<ggml_tensor *(graph &)>;

// Median microseconds of one run of the graph; scheduled and allocated as llama.cpp does it.
double time_graph(const machine & m, const build_fn & build) {
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, m.n_threads);
    std::vector<ggml_backend_t> backends = { cpu };
    if (!m.is_cpu()) {
        backends.insert(backends.begin(), ggml_backend_dev_init(m.device, nullptr));
    }
    ggml_backend_sched_t sched = ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), 4096, false, true);

    graph g;
    g.backend = backends[0];
    g.sched   = sched;
    g.ctx     = ggml_init({ 64 << 20, nullptr, true });
    g.gf      = ggml_new_graph_custom(g.ctx, 4096, false);
    ggml_tensor * out = build(g);
    ggml_set_output(out);
    ggml_build_forward_expand(g.gf, out);
    if (!ggml_backend_sched_alloc_graph(sched, g.gf)) {
        std::exit(1);
    }
    for (ggml_tensor * t : g.inputs) {
        fill(t, 0.3f, 0.05f);
    }

    std::vector<double> times;
    for (int i = 0; i < m.repeats + 2; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        ggml_backend_sched_graph_compute(sched, g.gf);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    ggml_free(g.ctx);
    ggml_backend_sched_free(sched);
    for (ggml_backend_t backend : backends) {
        ggml_backend_free(backend);
    }
    std::sort(times.begin() + 2, times.end());
    return times[2 + m.repeats / 2];
}

struct selector_inputs {
    ggml_tensor * logits;       // [vocabulary, rows]
    ggml_tensor * gate;         // [rank, rows]
    ggml_tensor * predecessor;  // [rank, vocabulary]
    ggml_tensor * successor;    // [rank, vocabulary]
};

// The selector from the logits to the lattice, in the order of the lean graph's nodes; without the anchor's id, which
// takes a place among the candidates there.
ggml_tensor * lean_selector(graph & g, const selector_inputs & in) {
    const int64_t rows   = CONV.rows();
    const int64_t scored = rows - 1;
    const auto    rows_of = [&](ggml_tensor * t, int64_t ne0, int64_t n, int64_t from) {
        const size_t column = ne0 * sizeof(float);
        return ggml_view_4d(g.ctx, t, ne0, n, scored, 1, column, column * n, column * n * rows, column * n * from);
    };
    const auto embed = [&](ggml_tensor * table, ggml_tensor * ids) {
        return ggml_get_rows(g.ctx, table, ggml_reshape_1d(g.ctx, ids, TOP_K * rows));
    };
    ggml_tensor * candidates = ggml_top_k(g.ctx, in.logits, TOP_K);
    ggml_tensor * unary      = ggml_get_rows(g.ctx, ggml_reshape_3d(g.ctx, in.logits, 1, VOCAB, rows), candidates);
    ggml_build_forward_expand(g.gf, unary);
    ggml_tensor * after  = embed(in.successor, candidates);
    ggml_tensor * before = embed(in.predecessor, candidates);
    ggml_tensor * gated  = ggml_mul(g.ctx, rows_of(before, RANK, TOP_K, 0), rows_of(in.gate, RANK, 1, 1));
    ggml_tensor * scores = ggml_mul_mat(g.ctx, rows_of(after, RANK, TOP_K, 1), gated);
    scores               = ggml_add(g.ctx, scores, rows_of(unary, TOP_K, 1, 1));
    ggml_build_forward_expand(g.gf, scores);
    ggml_tensor * ids = ggml_cast(g.ctx, candidates, GGML_TYPE_F32);
    ids               = ggml_view_3d(g.ctx, ids, TOP_K, scored, 1, ids->nb[1], ids->nb[1] * rows, ids->nb[1]);
    return ggml_concat(g.ctx, ids, ggml_reshape_3d(g.ctx, scores, TOP_K * TOP_K, scored, 1), 0);
}

// Runs of a fused kernel on the device's backend; 0 where the library has no such kernel.
unsigned long long count(const machine & m, const char * kernel) {
    const std::string backend = m.is_cpu() ? "cpu" : "cuda";
    const auto fn = (unsigned long long (*)()) dlsym(RTLD_DEFAULT, ("ggml_" + backend + "_dflash2_" + kernel + "_count").c_str());
    return fn ? fn() : 0;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4 && argc != 5) {
        return 2;
    }
    const bool lean = strcmp(argv[1], "lean") == 0;
    const auto conv = lean ? lean_conv : stock_conv;
    ggml_backend_load_all();
    const machine m = { ggml_backend_dev_by_name(argc == 5 ? argv[4] : "CPU"), std::atoi(argv[2]), std::atoi(argv[3]) };
    if (!m.device) {
        fprintf(stderr, "there is no device %s\n", argv[4]);
        return 1;
    }

    const double conv_us = time_graph(m, [&](graph & g) {
        ggml_tensor * x     = g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, CONV.width(), CONV.rows()));
        ggml_tensor * delta = g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 2 * CONV.taps * CONV.n_groups, CONV.rows()));
        ggml_tensor * base  = g.input(ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, CONV.width(), CONV.taps, 2));
        for (int i = 0; i < N_CONV; ++i) {
            x = conv(g.ctx, x, delta, base, CONV);
            ggml_build_forward_expand(g.gf, x);  // as the model's graph does: every convolution in one piece
        }
        return x;
    });
    // Every copy is part of the graph's result, so that none is left out and none waits for another.
    const auto copies = [&](graph & g, const std::function<ggml_tensor *()> & op) {
        ggml_tensor * out = op();
        for (int i = 1; i < m.n_copies(); ++i) {
            ggml_set_output(out);
            ggml_build_forward_expand(g.gf, out);
            out = op();
        }
        return out;
    };
    const double top_k_us = time_graph(m, [&](graph & g) {
        ggml_tensor * logits = g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, VOCAB, CONV.rows()));
        return copies(g, [&] { return ggml_top_k(g.ctx, logits, TOP_K); });
    });
    const double selector_us = !lean ? 0.0 : time_graph(m, [&](graph & g) {
        const auto            matrix = [&](int64_t a, int64_t b) { return g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, a, b)); };
        const selector_inputs in     = { matrix(VOCAB, CONV.rows()), matrix(RANK, CONV.rows()), matrix(RANK, VOCAB), matrix(RANK, VOCAB) };
        return copies(g, [&] { return lean_selector(g, in); });
    });
    printf("{\"conv\": %.3f, \"top_k\": %.3f, \"selector\": %.3f, \"conv_runs\": %llu, \"top_k_runs\": %llu, "
           "\"selector_runs\": %llu}\n",
            conv_us / N_CONV, top_k_us / m.n_copies(), selector_us / m.n_copies(), count(m, "conv"), count(m, "top_k"),
            count(m, "selector"));
    return 0;
}
