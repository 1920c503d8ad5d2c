#pragma once

#include "common.cuh"

// As upstream has it on a card with tensor cores: every type but these.
inline bool ggml_cuda_should_use_mmq(ggml_type type, int, int64_t, int64_t) {
    return type != GGML_TYPE_IQ1_M && type != GGML_TYPE_TQ1_0 && type != GGML_TYPE_TQ2_0;
}
