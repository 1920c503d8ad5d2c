// Counts what a llama.cpp program asks its backends for, without changing it: preloaded (LD_PRELOAD), it stands between
// the program and libggml-base, and between libggml-cuda and libcudart. The numbers lie in the file DFLASH2_COUNTS,
// which another process may read at any time: eight 64-bit numbers, in the order of `enum count`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum count {
    GRAPHS,           // graphs of llama.cpp that were computed
    GRAPH_NS,         // time inside these calls: on a CPU the computing itself, on a GPU only its launch
    CUDA_GRAPHS,      // CUDA graphs launched
    CUDA_KERNELS,     // kernels launched one by one, those that a graph captures included
    CUDA_WAIT_NS,     // time in calls that wait for the GPU: synchronisation, copies to the host
    N_COUNTS = 8,     // the last three are spare
};

static volatile uint64_t   unseen[N_COUNTS];
static volatile uint64_t * counts = unseen;

__attribute__((constructor)) static void open_counts(void) {
    const char * path = getenv("DFLASH2_COUNTS");
    const int    file = path ? open(path, O_RDWR) : -1;
    if (file >= 0) {
        void * page = mmap(NULL, N_COUNTS * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) {
            counts = page;
        }
        close(file);
    }
}

static void add(enum count which, uint64_t n) {
    __atomic_fetch_add(&counts[which], n, __ATOMIC_RELAXED);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + t.tv_nsec;
}

// The function that this one stands in front of.
#define REAL(name)                                          \
    static __typeof__(&name) real;                          \
    if (!real) {                                            \
        real = (__typeof__(&name)) dlsym(RTLD_NEXT, #name); \
    }

#define TIMED(type, name, which, parameters, arguments) \
    type name parameters {                              \
        REAL(name)                                      \
        const uint64_t begin  = now();                  \
        const type     result = real arguments;         \
        add(which, now() - begin);                      \
        return result;                                  \
    }

#define COUNTED(type, name, which, parameters, arguments) \
    type name parameters {                                \
        REAL(name)                                        \
        add(which, 1);                                    \
        return real arguments;                            \
    }

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    REAL(ggml_backend_sched_graph_compute_async)
    const uint64_t begin  = now();
    const int      result = real(sched, graph);
    add(GRAPHS, 1);
    add(GRAPH_NS, now() - begin);
    return result;
}

struct dim3 { unsigned x, y, z; };

TIMED(int, cudaStreamSynchronize, CUDA_WAIT_NS, (void * stream), (stream))
TIMED(int, cudaEventSynchronize, CUDA_WAIT_NS, (void * event), (event))
TIMED(int, cudaDeviceSynchronize, CUDA_WAIT_NS, (void), ())
COUNTED(int, cudaGraphLaunch, CUDA_GRAPHS, (void * graph, void * stream), (graph, stream))
COUNTED(int, cudaLaunchKernelExC, CUDA_KERNELS, (const void * config, const void * kernel, void ** args), (config, kernel, args))
COUNTED(int, cudaLaunchKernel, CUDA_KERNELS,
        (const void * kernel, struct dim3 grid, struct dim3 block, void ** args, size_t shared, void * stream),
        (kernel, grid, block, args, shared, stream))
// what CUDA 13's compiler calls instead
COUNTED(int, __cudaLaunchKernel, CUDA_KERNELS,
        (const void * kernel, struct dim3 grid, struct dim3 block, void ** args, size_t shared, void * stream),
        (kernel, grid, block, args, shared, stream))

int cudaMemcpyAsync(void * to, const void * from, size_t n_bytes, int kind, void * stream) {
    REAL(cudaMemcpyAsync)
    const uint64_t begin  = now();
    const int      result = real(to, from, n_bytes, kind, stream);
    if (kind == 2) { // device to host: waits, unless the host's memory is pinned
        add(CUDA_WAIT_NS, now() - begin);
    }
    return result;
}
