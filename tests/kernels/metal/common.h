// Stands in for llama.cpp's kernels/common.h: the part of Metal that our kernels use, for two host compilers.
// g++ runs the kernels (address spaces are nothing, lanes.h runs the threads); clang, in C++ for OpenCL, only checks
// that every pointer keeps its address space.
#pragma once

#define MIN(x, y) ((x) < (y) ? (x) : (y))

#ifdef __OPENCL_CPP_VERSION__

typedef int    int32_t;
typedef short  int16_t;
typedef long   int64_t;
typedef ulong  uint64_t;
typedef uint   uint32_t;
typedef uchar  uint8_t;
#define kernel      __kernel
#define device      __global
#define threadgroup __local
#define constant    __constant

// these are OpenCL's own names
#define atomic_uint               metal_atomic_uint
#define atomic_store_explicit     metal_store
#define atomic_load_explicit      metal_load
#define atomic_fetch_add_explicit metal_fetch_add
#define memory_order_relaxed      0
#define as_type                   metal_as_type

struct metal_atomic_uint { uint value; };
void metal_store(threadgroup metal_atomic_uint *, uint, int);
uint metal_load(threadgroup metal_atomic_uint *, int);
uint metal_fetch_add(threadgroup metal_atomic_uint *, uint, int);
template <typename To, typename From> To metal_as_type(From);

#else

#include "../lanes.h"

#include <sys/types.h>  // uint, ulong, ushort

#include <cstdint>

#define kernel      static
#define device
#define constant const
#define threadgroup  // of pointers; arrays become LANES_SHARED before this is compiled

struct uint3   { uint x, y, z; };
struct ushort3 { ushort x, y, z; };
struct atomic_uint { uint value; };

enum { memory_order_relaxed };

static inline void atomic_store_explicit(atomic_uint * at, uint value, int) { at->value = value; }
static inline uint atomic_load_explicit(const atomic_uint * at, int) { return at->value; }
static inline uint atomic_fetch_add_explicit(atomic_uint * at, uint n, int) {
    const uint before = at->value;
    at->value += n;
    return before;
}

template <typename To, typename From>
static inline To as_type(From value) {
    static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits");
    To bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

#endif

enum class mem_flags { mem_threadgroup };
#ifdef __OPENCL_CPP_VERSION__
void threadgroup_barrier(mem_flags);
#else
static inline void threadgroup_barrier(mem_flags) { lanes::block_barrier(); }
#endif

#include "ggml-metal-impl.h"
