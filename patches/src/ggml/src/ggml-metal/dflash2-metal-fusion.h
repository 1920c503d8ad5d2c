// Entries of the fusion table for the convolution of the lean DFlash 2 graph, as ggml's depth-first visit orders them.
#pragma once

#include "dflash2-metal.h"

#include <vector>

static const std::vector<ggml_op> ops_dflash2_conv_1 = {
    GGML_OP_REPEAT, GGML_OP_VIEW, GGML_OP_ADD, GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_MUL
};
static const std::vector<ggml_op> ops_dflash2_conv_2 = {
    GGML_OP_REPEAT, GGML_OP_VIEW, GGML_OP_ADD, GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_MUL,
    GGML_OP_VIEW, GGML_OP_VIEW, GGML_OP_MUL, GGML_OP_ACC
};
static const std::vector<ggml_op> ops_dflash2_conv_3 = {
    GGML_OP_REPEAT, GGML_OP_VIEW, GGML_OP_ADD, GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_MUL,
    GGML_OP_VIEW, GGML_OP_VIEW, GGML_OP_MUL, GGML_OP_ACC,
    GGML_OP_VIEW, GGML_OP_VIEW, GGML_OP_MUL, GGML_OP_ACC
};
