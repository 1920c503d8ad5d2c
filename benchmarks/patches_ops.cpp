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

using build_fn = std::function<ggml_tensor *(ggml_context *, std::vector<ggml_tensor *> &)>;

// Median microseconds of one run of the graph; scheduled and allocated as llama.cpp does it.
double time_graph(int n_threads, int repeats, const build_fn & build) {
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, n_threads);
    ggml_backend_sched_t sched = ggml_backend_sched_new(&backend, nullptr, 1, 4096, false, true);

    ggml_context * ctx = ggml_init({ 64 << 20, nullptr, true });
    std::vector<ggml_tensor *> inputs;
    ggml_tensor * out = build(ctx, inputs);
    ggml_set_output(out);
    ggml_cgraph * gf = ggml_new_graph_custom(ctx, 4096, false);
    ggml_build_forward_expand(gf, out);
    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        std::exit(1);
    }
    for (ggml_tensor * t : inputs) {
        fill(t, 0.3f, 0.05f);
    }

    std::vector<double> times;
    for (int i = 0; i < repeats + 2; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        ggml_backend_sched_graph_compute(sched, gf);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    ggml_free(ctx);
    ggml_backend_sched_free(sched);
    ggml_backend_free(backend);
    std::sort(times.begin() + 2, times.end());
    return times[2 + repeats / 2];
}

ggml_tensor * input(ggml_context * ctx, std::vector<ggml_tensor *> & inputs, ggml_tensor * t) {
    GGML_UNUSED(ctx);
    ggml_set_input(t);
    ggml_set_output(t);  // kept over all runs of the graph
    inputs.push_back(t);
    return t;
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

    const double conv_us = time_graph(n_threads, repeats, [&](ggml_context * ctx, std::vector<ggml_tensor *> & inputs) {
        ggml_tensor * x     = input(ctx, inputs, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, CONV.width(), CONV.rows()));
        ggml_tensor * delta = input(ctx, inputs, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2 * CONV.taps * CONV.n_groups, CONV.rows()));
        ggml_tensor * base  = input(ctx, inputs, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, CONV.width(), CONV.taps, 2));
        for (int i = 0; i < N_CONV; ++i) {
            x = conv(ctx, x, delta, base, CONV);
        }
        return x;
    });
    const double top_k_us = time_graph(n_threads, repeats, [&](ggml_context * ctx, std::vector<ggml_tensor *> & inputs) {
        return ggml_top_k(ctx, input(ctx, inputs, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, VOCAB, CONV.rows())), TOP_K);
    });
    printf("{\"conv\": %.3f, \"top_k\": %.3f, \"conv_runs\": %llu, \"top_k_runs\": %llu}\n", conv_us / N_CONV, top_k_us,
            count("ggml_cpu_dflash2_conv_count"), count("ggml_cpu_dflash2_top_k_count"));
    return 0;
}
