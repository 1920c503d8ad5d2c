"""How long a DFlash 2 convolution llama.cpp's graph holds: beyond it, loading ends the process in an assertion."""

from __future__ import annotations

# Nodes of the pinned source's graph: 8 for each tap of each of a layer's four convolutions (build_dflash2_conv), and
# the rest of a layer and of a model, measured by the longest kernels that load with 1 to 12 layers.
_PER_TAP, _PER_LAYER, _PER_MODEL = 32, 63, 90
# Nodes it makes room for (llama_context::graph_max_nodes).
_LEAST, _PER_TENSOR = 1024, 12
_LAYER_TENSORS, _MODEL_TENSORS = 15, 6


def largest_kernel(layers: int, n_tensors: int | None = None) -> int:
    """The largest `conv_kernel_size` of a DFlash 2 drafter with `n_tensors`, by default those that each must have."""
    tensors = _MODEL_TENSORS + _LAYER_TENSORS * layers if n_tensors is None else n_tensors
    room = max(_LEAST, _PER_TENSOR * tensors)
    return (room - _PER_MODEL - _PER_LAYER * layers) // (_PER_TAP * layers)
