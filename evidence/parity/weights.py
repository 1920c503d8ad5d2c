"""A drafter's weights and geometry as its GGUF gives them, with what it shares with the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from dflash2.errors import EvidenceError
from dflash2.evidence.parity.rounding import rounded
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info

_SMALL = 1 << 20  # elements of a tensor that is kept
_CHUNK = 8192  # rows of a matrix in double precision at a time
_LAYER_TENSORS = frozenset(
    {f"{part}.weight" for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm")}
    | {f"{part}.weight" for part in ("attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
    | {f"{part}_conv_proj.weight" for part in ("attn", "ffn")}
    | {f"{part}_conv_base" for part in ("attn", "ffn")}
)
_TENSORS = frozenset(
    f"{name}.weight"
    for name in (
        "token_embd",
        "output",
        "fc",
        "enc.output_norm",
        "output_norm",
        "selector_predecessor",
        "selector_successor",
        "selector_hidden",
    )
)
_UNKNOWN_KEYS = ("rope.scaling.type", "attention.value_scale")


@dataclass(frozen=True)
class Geometry:
    """What the file says of a drafter beside its weights; sizes in elements, names as in `dflash.*` metadata.

    `sliding` and `causal` hold one answer per layer; `output_scale` and `softcap` are those of a DFlash 2 drafter,
    1 and 0 where there is none, since llama.cpp leaves a v1 drafter's logits to the sampler, whose argmax is the same.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    eps: float
    window: int
    sliding: tuple[bool, ...]
    causal: tuple[bool, ...]
    taps: int
    group: int
    top_k: int
    embedding_scale: float
    attention_scale: float
    output_scale: float
    softcap: float

    @classmethod
    def of(cls, info: GGUFInfo) -> Geometry:
        """From the header; raises EvidenceError for what the reference does not compute."""
        _refuse_unknown(info)

        def number(key: str, default: float | None = None) -> float:
            value = info.metadata.get(info.own(key), default)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise EvidenceError(f"{info.path}: {info.own(key)} is {value!r}; convert the checkpoint again.")
            return value

        layers, heads = int(number("block_count")), int(number("attention.head_count"))
        head_dim = int(number("attention.key_length", number("embedding_length") / heads))
        window = int(number("attention.sliding_window", 0))
        pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
        sliding = tuple(bool(one) for one in pattern) if isinstance(pattern, tuple) and window else (False,) * layers
        causal = info.metadata.get(info.own("attention.causal")) is True
        causal_swa = info.metadata.get(info.own("attention.causal_swa"), causal) is True
        top_k = int(number("selector_top_k", 0))
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=int(number("attention.head_count_kv", heads)),
            head_dim=head_dim,
            rope_dim=int(number("rope.dimension_count", head_dim)),
            rope_base=number("rope.freq_base", 10000.0),
            eps=number("attention.layer_norm_rms_epsilon"),
            window=window,
            sliding=sliding,
            causal=tuple(causal_swa if one else causal for one in sliding),
            taps=int(number("conv_kernel_size", 0)),
            group=int(number("conv_group_size", 0)),
            top_k=top_k,
            embedding_scale=number("embedding_scale", 1.0) or 1.0,
            attention_scale=number("attention.scale", 0.0) or head_dim**-0.5,
            output_scale=(number("logit_scale", 1.0) or 1.0) if top_k else 1.0,
            softcap=number("final_logit_softcapping", 0.0) if top_k else 0.0,
        )


def _refuse_unknown(info: GGUFInfo) -> None:
    unknown = [name for name in info.tensor_names if not _known(name)]
    unknown += [info.own(key) for key in _UNKNOWN_KEYS if info.metadata.get(info.own(key)) not in (None, "none")]
    if info.metadata.get(info.own("hidden_activation"), "silu") != "silu":
        unknown.append(info.own("hidden_activation"))
    if unknown:
        raise EvidenceError(
            f"{info.path}: the reference does not compute {min(unknown)}; parity can be asked of plain DFlash and "
            "DFlash 2 drafters."
        )


def _known(name: str) -> bool:
    return name.split(".", 2)[-1] in _LAYER_TENSORS if name.startswith("blk.") else name in _TENSORS


class Weights:
    """Matrices of `drafter`, and embedding and head of `target` where the drafter has none, in double precision.

    Read when they are needed, and large ones not kept, so that a drafter of any size fits. With `rounding`, every
    product rounds its activations as llama.cpp does for the type of that matrix.
    """

    def __init__(self, drafter: Path, target: Path, *, rounding: bool) -> None:
        self._drafter, self._target = read_gguf_info(drafter), read_gguf_info(target)
        self._data = {info.path: np.memmap(info.path, np.uint8, "r") for info in (self._drafter, self._target)}
        self.geometry = Geometry.of(self._drafter)
        self.rounding = rounding
        self._kept: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether the drafter itself holds this tensor."""
        return name in self._drafter.tensor_names

    def type_of(self, name: str) -> str:
        """GGUF's name of its type."""
        return self._find(name)[1].type_name

    def vector(self, name: str) -> Any:
        """The whole tensor, slowest dimension first: float64."""
        info, tensor = self._find(name)
        n = tensor.shape[0]
        values = self._rows(info, tensor, np.arange(int(np.prod(tensor.shape)) // n))
        return values.reshape(tensor.shape[::-1])

    def rows(self, name: str, ids: Any) -> Any:
        """Rows `ids` [...] of a matrix: [..., columns]."""
        flat = ids.reshape(-1).numpy()
        return self._rows(*self._find(name), flat).reshape(*ids.shape, -1)

    def product(self, name: str, x: Any) -> Any:
        """`x` [..., columns] times the transposed matrix: [..., rows]."""
        info, tensor = self._find(name)
        if self.rounding:
            x = rounded(x, tensor.type_name)
        n = tensor.shape[1]
        parts = [np.arange(first, min(first + _CHUNK, n)) for first in range(0, n, _CHUNK)]
        return torch.cat([x @ self._rows(info, tensor, part).T for part in parts], -1)

    def _rows(self, info: GGUFInfo, tensor: TensorInfo, ids: Any) -> Any:
        n_elements = int(np.prod(tensor.shape))
        raw = self._data[info.path][tensor.offset : tensor.offset + tensor.n_bytes]
        raw = raw.reshape(n_elements // tensor.shape[0], -1)
        if n_elements > _SMALL:
            return _values(raw[ids], tensor)
        if tensor.name not in self._kept:
            self._kept[tensor.name] = _values(raw, tensor)
        return self._kept[tensor.name][ids]

    def _find(self, name: str) -> tuple[GGUFInfo, TensorInfo]:
        if self.has(name):
            return self._drafter, self._drafter.tensor(name)
        if name == "output.weight":
            if self.has("token_embd.weight"):
                return self._drafter, self._drafter.tensor("token_embd.weight")
            if name not in self._target.tensor_names:
                name = "token_embd.weight"  # tied
        return self._target, self._target.tensor(name)


def _values(raw: Any, tensor: TensorInfo) -> Any:
    """Rows of bytes as numbers, [rows, columns] float64."""
    values = dequantize(raw, GGMLQuantizationType[tensor.type_name])
    return torch.from_numpy(np.ascontiguousarray(values, np.float64)).reshape(len(raw), -1)
