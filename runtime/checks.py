"""What llama.cpp would assert of files and options, and so end the process, asked first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash2.errors import Dflash2Error, GGUFError, TargetMismatchError
from dflash2.gguf_info import GGUFInfo

_MOST_LAYERS, _MOST_EXPERTS, _MOST_THREADS = 512, 1024, 512  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS, GGML_MAX_N_THREADS
_WITHOUT_ROPE = ("nemotron_h", "nemotron_h_moe")  # whatever their files say
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# These are multiplied or read as F32, whatever they are stored as.
_F32_ONLY = ("norm.weight", "conv_base", "rope_freqs.weight")
# ggml's numbers of the types a KV cache can have, as llama-server's --cache-type-k lists them.
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
_UNQUANTISED = (0, 1, 30)
_SPLIT_BY_TENSOR = 3
_N_BATCH = 512  # Llama's default of n_batch and n_ubatch


def check_header(info: GGUFInfo) -> None:
    """Refuse a model file, target or drafter, at whose numbers or tensor types llama.cpp asserts; raises GGUFError."""
    layers = _within(info, "block_count", 1, _MOST_LAYERS)
    _within(info, "nextn_predict_layers", 0, layers - 1)
    _check_experts(info)
    scaling = info.metadata.get(info.own("rope.scaling.type"), "none")
    if scaling not in _ROPE_SCALINGS:
        raise GGUFError(
            f"{info.path}: {info.own('rope.scaling.type')} is {scaling!r}; llama.cpp knows {', '.join(_ROPE_SCALINGS)}."
        )
    _check_rope(info)
    for tensor in info.tensors:
        if tensor.name.endswith(_F32_ONLY) and tensor.type_name != "F32":
            raise GGUFError(
                f"{info.path}: tensor {tensor.name!r} is {tensor.type_name} and must be F32; convert again."
            )


def _check_experts(info: GGUFInfo) -> None:
    experts = _within(info, "expert_count", 0, _MOST_EXPERTS)
    used = info.metadata.get(info.own("expert_used_count"), 0)
    counts = used if isinstance(used, tuple) else (used,)
    if not all(isinstance(count, int) and 0 <= count <= experts for count in counts) or (experts and not any(counts)):
        raise GGUFError(f"{info.path}: {info.own('expert_used_count')} is {used}, of {experts} experts; get it again.")
    groups = info.integer(info.own("expert_group_count")) or 0
    groups_used = info.integer(info.own("expert_group_used_count")) or 0
    if groups and (groups >= experts or (groups > 1 and (experts % groups or not 0 < groups_used < groups))):
        raise GGUFError(
            f"{info.path}: {info.own('expert_group_count')} is {groups} ({groups_used} used), of {experts} experts; "
            "get the file again."
        )


def _check_rope(info: GGUFInfo) -> None:
    if info.architecture in _WITHOUT_ROPE:
        return
    rotated = info.integer(info.own("rope.dimension_count"))
    width = info.integer(info.own("attention.key_length"))
    if rotated is not None and (rotated % 2 or (width is not None and rotated > width)):
        raise GGUFError(
            f"{info.path}: {info.own('rope.dimension_count')} is {rotated}, which must be even and at most the width "
            f"of a head ({width}); get the file again."
        )


def _within(info: GGUFInfo, suffix: str, least: int, most: int) -> int:
    value = info.integer(info.own(suffix))
    if not least <= (value if value is not None else 0) <= most:
        raise GGUFError(f"{info.path}: {info.own(suffix)} is {value}, not {least} to {most}; get the file again.")
    return value or 0


def check_drafter(info: GGUFInfo, n_vocab: int, top_k: int) -> None:
    """Refuse a drafter that would be read wrongly, or whose reduced vocabulary asserts in the first draft.

    Raises TargetMismatchError or GGUFError.
    """
    if info.integer(info.own("hyper_connection_count")):
        raise TargetMismatchError(
            f"{info.path} has {info.own('hyper_connection_count')}: a DSpark drafter, which llama-server runs with "
            "--spec-type draft-dspark."
        )
    keys, values = (info.integer(info.own(f"attention.{part}_length")) for part in ("key", "value"))
    if keys != values:
        raise TargetMismatchError(
            f"{info.path}: attention.key_length is {keys} and value_length {values}; llama.cpp's drafters have one."
        )
    pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
    layers = info.integer(info.own("block_count"))
    if isinstance(pattern, tuple) and len(pattern) != layers:
        raise TargetMismatchError(
            f"{info.path}: sliding_window_pattern is for {len(pattern)} layers, there are {layers}; convert again."
        )
    if "d2t" in info.tensor_names:
        _check_reduced_vocabulary(info, n_vocab, top_k)


def _check_reduced_vocabulary(info: GGUFInfo, n_vocab: int, top_k: int) -> None:
    d2t = info.tensor("d2t")
    problem = ""
    if d2t.type_name != "I64":
        problem = f"is {d2t.type_name}, not I64"
    elif "output.weight" not in info.tensor_names or info.tensor("output.weight").shape[-1] != d2t.shape[0]:
        problem = f"maps {d2t.shape[0]} tokens, and there is no output.weight of as many rows"
    elif d2t.shape[0] < top_k:
        problem = f"maps {d2t.shape[0]} tokens, fewer than the {top_k} candidates of the selector"
    else:
        tokens = np.fromfile(info.path, np.int64, d2t.shape[0], offset=d2t.offset)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            problem = f"names the tokens {tokens.min()} to {tokens.max()} of a vocabulary of {n_vocab}"
        elif len(np.unique(tokens)) != len(tokens):
            problem = "names a token twice"
    if problem:
        raise GGUFError(f"{info.path}: tensor 'd2t' {problem}; convert the drafter again.")


def check_options(options: Mapping[str, Any], *, shares_head: bool) -> None:
    """Refuse values among the keyword arguments of `DFlashLlama` that llama.cpp asserts on; raises Dflash2Error.

    `shares_head`: the drafter has no embeddings and head of its own, and so reads the target's.
    """
    for name in ("type_k", "type_v", "type_k_draft", "type_v_draft"):
        value = options.get(name)
        if value is not None and value not in KV_TYPES.values():
            known = ", ".join(f"{number} ({label})" for label, number in KV_TYPES.items())
            raise Dflash2Error(f"{name}={value!r} is not a type of a KV cache; choose among {known}.")
        if name.startswith("type_v") and value not in (None, *_UNQUANTISED) and not options.get("flash_attn", True):
            raise Dflash2Error(f"{name}={value}: quantised values need flash_attn=True.")
    for name, most in (
        ("n_batch", None),
        ("n_ubatch", None),
        ("n_threads", _MOST_THREADS),
        ("n_threads_batch", _MOST_THREADS),
    ):
        value = options.get(name)
        if value is not None and not (value >= 1 and (most is None or value <= most)):
            raise Dflash2Error(f"{name}={value!r} is not {'at least 1' if most is None else f'in 1..{most}'}.")
    split_mode = options.get("split_mode", 1)
    if split_mode not in range(_SPLIT_BY_TENSOR + 1):
        raise Dflash2Error(f"split_mode={split_mode!r} is unknown to llama.cpp; it has 0 to {_SPLIT_BY_TENSOR}.")
    if split_mode == _SPLIT_BY_TENSOR and shares_head:
        raise Dflash2Error(
            "split_mode=3 (by tensor) cannot be shared with this drafter, which reads the target's embeddings and "
            "head; use another split_mode, or a drafter with its own."
        )


def check_ubatch(options: Mapping[str, Any], depth: int, *, snapshots: bool) -> None:
    """Refuse an n_ubatch that cannot hold the rows of one step back by snapshots; raises Dflash2Error."""
    n_ubatch = min(options.get("n_batch", _N_BATCH), options.get("n_ubatch", _N_BATCH))
    if snapshots and depth > 0 and n_ubatch < depth + 2:
        raise Dflash2Error(
            f"depth {depth} on this target needs n_ubatch (and n_batch) of at least {depth + 2}, got {n_ubatch}."
        )


def check_devices(drafter_devices: tuple[str, ...], target_devices: tuple[str, ...], *, shares_head: bool) -> None:
    """Refuse to put a drafter where it cannot read what it shares with the target; raises Dflash2Error."""
    missing = [name for name in target_devices if name not in drafter_devices]
    if shares_head and missing:
        raise Dflash2Error(
            f"device_draft leaves out {missing[0]}, where the target may keep the embeddings and the head that this "
            "drafter reads; name every device of the target, or use a drafter with its own."
        )
