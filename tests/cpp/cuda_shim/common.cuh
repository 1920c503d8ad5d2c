// What dflash2-dispatch.cu and the host part of mmvq.cu take from CUDA's side of ggml, for a machine without a card.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstdio>

#define __host__
#define __device__
#define GGML_LOG_WARN(...) fprintf(stderr, __VA_ARGS__)

struct shim_device {
    int cc;
};
struct shim_info {
    shim_device devices[2];
};
inline const shim_info & ggml_cuda_info() {
    static const shim_info info = { { { 860 }, { 750 } } };
    return info;
}
