// Plain C names for what a DFlash runtime outside C++ needs of libllama.
//
// The functions of llama-ext.h have C++ linkage: their exported names depend on the compiler. These do not, and they
// check their arguments where llama.cpp would abort: for NULL in place of a model or a context they return what they
// return where there is nothing (0, false, NULL).
#pragma once

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

// Raised when a function below changes its meaning or is taken away; not when one is added.
#define DFLASH2_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// DFLASH2_ABI_VERSION of the library that is running.
LLAMA_API int32_t dflash2_abi_version(void);

// How the rows of dflash2_get_embeddings_nextn, n_embd floats each, hold the selector's lattice of K candidates:
// 1: K ids | K*K scores, predecessor-major | zeros; every predecessor of row 1 is the anchor: upstream's.
// 2: K ids | K*K scores | anything; row 0 of a block is anything; in row 1 only predecessor 0 is the anchor.
LLAMA_API int32_t dflash2_lattice_layout(void);

// Candidates per position of a DFlash 2 drafter's selector; 0 for any other model.
LLAMA_API int32_t dflash2_model_selector_top_k(const struct llama_model * model);

// Keep, at every decode, the input of layer `layer` (0 to n_layer, the output of the last one); false if the model has
// no such layer.
LLAMA_API bool dflash2_set_embeddings_layer_inp(struct llama_context * ctx, uint32_t layer, bool value);

// The rows kept of `layer` for the whole last batch, [n_tokens][n_embd]; NULL if there are none.
LLAMA_API float * dflash2_get_embeddings_layer_inp(struct llama_context * ctx, uint32_t layer);

// Keep the selector's rows at every decode: of the outputs (masked), or of all tokens.
LLAMA_API void dflash2_set_embeddings_nextn(struct llama_context * ctx, bool value, bool masked);

// The selector's rows of the last batch, laid out as dflash2_lattice_layout says; NULL if there are none.
LLAMA_API float * dflash2_get_embeddings_nextn(struct llama_context * ctx);

#ifdef __cplusplus
}
#endif
