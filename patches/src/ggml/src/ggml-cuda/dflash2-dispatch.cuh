// Hooks of mmvq.cu and ggml-cuda.cu into the table of dflash2-dispatch.h.
#pragma once

#include "ggml.h"

#include <cstdint>

// Whether the table sends a product with `rows` columns of activations to MMVQ: 1 yes, 0 no (MMQ takes it), -1 if it
// says nothing. One row, and what MMVQ cannot take, are never decided here.
int dflash2_cuda_use_mmvq(ggml_type type, int cc, int64_t rows);

// Rows up to which MMVQ serves the experts' products: at most `stock`, for which the kernels are compiled.
int dflash2_cuda_id_rows(ggml_type type, int cc, int stock);

// What the backend hands out by name, see dflash2-dispatch.cu; NULL for any other name.
void * dflash2_cuda_proc_address(const char * name);
