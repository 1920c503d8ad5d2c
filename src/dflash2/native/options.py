"""What a model and a context are made with: plain values, no pointer among them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model go; the fields are llama.cpp's model parameters of the same names.

    `devices` are names as llama.cpp's log gives them (CUDA0, Metal, RPC0); None for all, () for the CPU.
    """

    n_gpu_layers: int = 0
    split_mode: int = 1
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    load_mode: int | None = None
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class AttentionOptions:
    """How keys and values are kept and read; the fields are llama.cpp's context parameters of the same names."""

    flash_attn_type: int
    type_k: int
    type_v: int


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of a context (llama.cpp's names, sizes in tokens); the rest stays at llama.cpp's own defaults."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    n_rs_seq: int = 0
    offload_kqv: bool = True
    op_offload: bool = True
    flash_attn_type: int | None = None
    swa_full: bool = False
    type_k: int | None = None
    type_v: int | None = None
    yarn_attn_factor: float | None = None


class Outputs(Enum):
    """Which rows of a batch get logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"
