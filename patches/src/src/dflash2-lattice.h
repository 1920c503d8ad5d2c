// DFlash 2's convolution and selector in fewer graph nodes, and the compact lattice that the selector leaves.
#pragma once

#include "ggml-backend.h"
#include "llama-graph.h"

// False where DFLASH2_NO_LEAN_GRAPH=1: the graph is upstream's.
bool dflash2_lean_graph();

// How the host's rows hold the lattice of K candidates; a row has n_embd floats in both.
// 1: K ids | K*K scores, predecessor-major | zeros, where every predecessor of row 1 is the anchor: upstream's.
// 2: K ids | K*K scores | anything; row 0 of a block is anything; in row 1 only predecessor 0 is the anchor.
int32_t dflash2_lattice_layout_in_use();

// The two-tap convolution of `hidden` [D, N]: with `delta` [2 sides * taps * groups, N] projected from the sublayer's
// input, and `base` [D, taps, 2]. Returns [D, N]. All its nodes follow each other in the graph.
ggml_tensor * dflash2_lean_conv(llm_graph_context & g, ggml_tensor * hidden, ggml_tensor * delta, ggml_tensor * base, int side);

// Top-k candidates and the scores of their pairs; leaves them in the result as [K + K*K, rows - 1, blocks].
void dflash2_lean_selector(llm_graph_context & g, const llama_model & model, ggml_tensor * tokens);

// Copies a compact lattice to the rows of its tokens, `n_embd` floats each; false for any other tensor.
bool dflash2_copy_lattice(ggml_backend_t backend, const ggml_tensor * lattice, const llama_ubatch & ubatch, float * rows, uint32_t n_embd);
