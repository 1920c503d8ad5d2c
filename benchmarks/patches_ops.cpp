// Times the convolution and TOP_K of one draft pass on the CPU backend of whichever ggml the loader finds.
//   patches_ops stock|lean THREADS REPEATS -> one JSON object: microseconds per op (median), runs of each fused kernel

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
#include <vector>

namespace {

// Qwen3.8-27B-DFlash2: hidden 5120 in groups of 16, 2 taps, a block of 8, vocabulary 248320, 16 candidates
constexpr conv_shape CONV   = { 16, 320, 2, 8, 1, 0 };
constexpr int64_t    VOCAB  = 248320;
constexpr int        TOP_K  = 16;
constexpr int        N_CONV = 20;

void fill(ggml_tensor * t, float mean, float deviation) {
    std::mt19937                    random(1);
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float>              values(ggml_nelements(t));
    for (float & v : values) {
        v = normal(random);
    }
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

struct graph {
    ggml_context *             ctx;
    ggml_cgraph *              gf;
    std::vector<ggml_tensor *> inputs;

    ggml_tensor * input(ggml_tensor * t) {
        ggml_set_input(t);
        ggml_set_output(t);  // kept over all runs of the graph
        inputs.push_back(t);
        ggml_build_forward_expand(gf, t);
        return t;
    }
};

using build_fn = std::function<ggml_tensor *(graph &)>;

// Median microseconds of one run of the graph; scheduled and allocated as llama.cpp does it.
double time_graph(int n_threads, int repeats, const build_fn & build) {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, n_threads);
    ggml_backend_sched_t sched = ggml_backend_sched_new(&backend, nullptr, 1, 4096, false, true);

    graph g;
    g.ctx = ggml_init({ 64 << 20, nullptr, true });
    g.gf  = ggml_new_graph_custom(g.ctx, 4096, false);
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
    for (int i = 0; i < repeats + 2; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        ggml_backend_sched_graph_compute(sched, g.gf);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    ggml_free(g.ctx);
    ggml_backend_sched_free(sched);
    ggml_backend_free(backend);
    std::sort(times.begin() + 2, times.end());
    return times[2 + repeats / 2];
}

unsigned long long count(const char * name) {
    const auto fn = (unsigned long long (*)()) dlsym(RTLD_DEFAULT, name);
    return fn ? fn() : 0;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    const auto conv      = strcmp(argv[1], "lean") == 0 ? lean_conv : stock_conv;
    const int  n_threads = std::atoi(argv[2]);
    const int  repeats   = std::atoi(argv[3]);

    const double conv_us = time_graph(n_threads, repeats, [&](graph & g) {
        ggml_tensor * x     = g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, CONV.width(), CONV.rows()));
        ggml_tensor * delta = g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 2 * CONV.taps * CONV.n_groups, CONV.rows()));
        ggml_tensor * base  = g.input(ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, CONV.width(), CONV.taps, 2));
        for (int i = 0; i < N_CONV; ++i) {
            x = conv(g.ctx, x, delta, base, CONV);
            ggml_build_forward_expand(g.gf, x);  // as the model's graph does: every convolution in one piece
        }
        return x;
    });
    const double top_k_us = time_graph(n_threads, repeats, [&](graph & g) {
        return ggml_top_k(g.ctx, g.input(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, VOCAB, CONV.rows())), TOP_K);
    });
    printf("{\"conv\": %.3f, \"top_k\": %.3f, \"conv_runs\": %llu, \"top_k_runs\": %llu}\n", conv_us / N_CONV, top_k_us,
            count("ggml_cpu_dflash2_conv_count"), count("ggml_cpu_dflash2_top_k_count"));
    return 0;
}
