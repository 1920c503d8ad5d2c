"""Checks of a drafter GGUF alone: what the loader, the graph or the runtime needs of the file itself.

A failed check here is a load that llama.cpp refuses, an assertion that ends the process, or drafts nobody accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from gguf.constants import GGUFValueType

from dflash2.constants import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from dflash2.converter.checking.drafter_facts import DrafterFacts
from dflash2.converter.checking.findings import Finding, error, ok, warning
from dflash2.converter.checking.forks import Spelling, is_dspark
from dflash2.converter.checking.loader_table import (
    SELECTOR_TENSOR,
    VOCABULARY_MAP,
    Slot,
    loader_slots,
    missing_sizes,
    must_be_f32,
)
from dflash2.converter.graph_size import largest_kernel
from dflash2.errors import GGUFError
from dflash2.gguf_info import GGUFInfo, TensorInfo

RECONVERT = "convert the drafter's checkpoint again with dflash2-convert"
_ROPE_TYPES = ("none", "linear", "yarn", "longrope")
_NEEDED = ("context_length", "attention.layer_norm_rms_epsilon")
_SHOWN = 3
_SECTIONS = 4  # of M-RoPE
# Types that no matrix multiplication of ggml takes as weights.
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
_LIST_TYPES = (GGUFValueType.INT32, GGUFValueType.UINT32)


def drafter_findings(spelling: Spelling, facts: DrafterFacts) -> list[Finding]:
    """Every check of the file alone, ok ones included; `facts` are those of `spelling.info`."""
    findings = [_architecture(spelling)]
    for check in _CHECKS:
        findings += check(spelling.info, facts)
    return findings


def _architecture(spelling: Spelling) -> Finding:
    if is_dspark(spelling.info):
        return error(
            "architecture",
            expected="dflash",
            found="DSpark",
            fix="run it with llama-server --spec-type draft-dspark; it is another method",
        )
    if spelling.fork is not None:
        how = " --tap-shift 0 or 1" if spelling.ambiguous else ""
        return error(
            "architecture",
            expected="dflash",
            found=f"{spelling.fork} (a fork's spelling)",
            fix=f"run dflash2 upgrade{how}: only the metadata is rewritten",
        )
    return ok("architecture", spelling.info.architecture)


def _keys(info: GGUFInfo, _facts: DrafterFacts) -> Iterator[Finding]:
    missing = missing_sizes(info) + [info.own(key) for key in _NEEDED if info.own(key) not in info.metadata]
    if missing:
        yield error("keys", expected=missing, found=None, fix=RECONVERT)
    else:
        yield ok("keys", "complete")


def _block_size(_info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    if facts.block_size is None or not MIN_BLOCK_SIZE <= facts.block_size <= MAX_BLOCK_SIZE:
        expected = f"{MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
        yield error("block_size", expected=expected, found=facts.block_size, fix=f"{RECONVERT} --block-size")
    else:
        yield ok("block_size", facts.block_size)


def _mask_token(_info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    if facts.mask_token_id is None:
        yield error("mask_token", expected="a token id", found=None, fix="run dflash2 upgrade --mask-token-id ID")
    else:
        yield ok("mask_token", facts.mask_token_id)


def _taps(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    stored = info.metadata.get(info.own("target_layers"))
    if not facts.taps or not isinstance(stored, tuple) or len(stored) != len(facts.taps):
        yield error("taps", expected="a list of layer ids", found=list(facts.taps), fix=RECONVERT)
    elif info.value_types[info.own("target_layers")].element not in _LIST_TYPES:
        element = info.value_types[info.own("target_layers")].element
        yield error("taps", expected="INT32", found=element.name if element else None, fix=RECONVERT)
    elif min(facts.taps) < 1:
        # The output of layer i is the input of layer i + 1, so that no id of this file can be 0.
        yield warning("taps", expected="ids from 1", found=list(facts.taps), fix=f"{RECONVERT}: they look unshifted")
    else:
        yield ok("taps", list(facts.taps))


def _selector(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    """The loader goes by the tensor, the driver by the key: both or neither."""
    top_k = info.metadata.get(info.own("selector_top_k"))
    has_tensor, has_key = SELECTOR_TENSOR in info.tensor_names, isinstance(top_k, int) and top_k > 0
    if has_tensor != has_key:
        yield error(
            "selector",
            expected=[SELECTOR_TENSOR, info.own("selector_top_k")],
            found=[SELECTOR_TENSOR] if has_tensor else [info.own("selector_top_k")],
            fix=f"{RECONVERT}: half a selector aborts or drafts garbage",
        )
        return
    yield ok("selector", f"DFlash {facts.version}")
    hidden = info.integer(info.own("embedding_length")) or 0
    if facts.selector:
        lattice = facts.selector.top_k * (facts.selector.top_k + 1)
        if hidden < lattice:
            yield error("selector_lattice", expected=lattice, found=hidden, fix="lower selector_top_k and train again")
        else:
            yield ok("selector_lattice", hidden, f"at least {lattice}")
    if facts.convolution:
        group = facts.convolution.group
        if not group or hidden % group:
            yield error("conv_group", expected=f"a divisor of {hidden}", found=group, fix=RECONVERT)
        else:
            yield ok("conv_group", group)
        yield _kernel(info, facts.convolution.taps)


def _kernel(info: GGUFInfo, taps: int) -> Finding:
    layers = max(info.integer(info.own("block_count")) or 1, 1)
    longest = largest_kernel(layers, len(info.tensors))
    if not 1 <= taps <= longest:
        fix = "train with a shorter kernel: llama.cpp's graph has no room for this one and aborts"
        return error("conv_kernel", expected=f"1 to {longest} for {layers} layers", found=taps, fix=fix)
    return ok("conv_kernel", taps)


def _window(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    layers = info.integer(info.own("block_count")) or 0
    pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
    if facts.attention.window is None:
        yield ok("sliding_window", "none")
    elif not isinstance(pattern, tuple):
        yield error("sliding_window", expected=f"a pattern of {layers} layers", found=None, fix=RECONVERT)
    elif len(pattern) != layers:
        yield error("sliding_window", expected=layers, found=len(pattern), fix=RECONVERT)
    else:
        yield ok("sliding_window", facts.attention.window)


def _causality(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    attention = facts.attention
    mixed = any(attention.sliding) and not all(attention.sliding)
    if attention.mixed_causality:
        yield warning(
            "causality",
            expected="one rule for all layers",
            found="sliding layers causal, full layers not"
            if attention.causal_sliding
            else "full layers causal, sliding layers not",
            fix="use a patched llama.cpp: stock reads one flag and drafts worse",
        )
    elif mixed and info.own("attention.causal_swa") not in info.metadata and not attention.causal_full:
        yield warning(
            "causality",
            expected=info.own("attention.causal_swa"),
            found=None,
            fix="convert again, or dflash2 upgrade --causal-swa on if config.json has no 'is_causal'",
        )
    else:
        yield ok("causality", "causal" if attention.causal else "not causal")


def _rope(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    rope = facts.rope
    if rope.sections and len(rope.sections) != _SECTIONS:
        yield error("rope_scaling", expected=f"{_SECTIONS} sections", found=list(rope.sections), fix=RECONVERT)
        return
    if rope.scaling is not None and rope.scaling not in _ROPE_TYPES:
        # llama.cpp asserts that it knows the name.
        yield error("rope_scaling", expected=list(_ROPE_TYPES), found=rope.scaling, fix=RECONVERT)
    elif rope.scaling is None and rope.factor not in (None, 0.0, 1.0):
        yield warning(
            "rope_scaling",
            expected=info.own("rope.scaling.type"),
            found=None,
            fix=f"{RECONVERT}: without the type, llama.cpp takes the factor {rope.factor:g} as linear",
        )
    else:
        yield ok("rope_scaling", rope.scaling or "none")


def _embeddings(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    """With embeddings alone, the loader makes them the head too."""
    found = [
        name
        for name, there in (("token_embd.weight", facts.own_embeddings), ("output.weight", facts.own_head))
        if there
    ]
    if len(found) == 1 and not (facts.own_head and VOCABULARY_MAP in info.tensor_names):
        yield warning(
            "embeddings",
            expected="embeddings and head, or neither",
            found=found,
            fix=f"{RECONVERT}, unless the two are tied in the checkpoint",
        )
    else:
        yield ok("embeddings", "the drafter's" if found else "the target's")


def _tensors(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if missing_sizes(info) or not isinstance(tokens, tuple):
        return
    slots = loader_slots(info, len(facts.taps), len(tokens))
    missing = [name for name, slot in slots.items() if slot.required and name not in info.tensor_names]
    unknown = [tensor.name for tensor in info.tensors if tensor.name not in slots]
    if missing:
        yield error("tensors", expected=_shown(missing), found=None, fix=f"{RECONVERT}: the file is incomplete")
    if unknown:
        yield error("tensors", expected=None, found=_shown(unknown), fix=f"{RECONVERT}: the loader does not know them")
    if not missing and not unknown:
        yield ok("tensors", len(info.tensors))
    yield from _shapes(info.tensors, slots)


def _shapes(tensors: Sequence[TensorInfo], slots: dict[str, Slot]) -> Iterator[Finding]:
    wrong = [
        tensor for tensor in tensors if tensor.name in slots and _trim(tensor.shape) != _trim(_shape(slots, tensor))
    ]
    for tensor in wrong[:_SHOWN]:
        yield error(
            "shapes",
            expected=f"{tensor.name} {list(_shape(slots, tensor))}",
            found=list(tensor.shape),
            fix=RECONVERT,
        )
    if not wrong:
        yield ok("shapes", "as the loader expects")


def _shape(slots: dict[str, Slot], tensor: TensorInfo) -> tuple[int, ...]:
    return slots[tensor.name].shape


def _trim(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing dimensions of one element do not count."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _types(info: GGUFInfo, _facts: DrafterFacts) -> Iterator[Finding]:
    for expected, wrong in (
        ("F32", [t for t in info.tensors if must_be_f32(t.name, t.shape) and t.type_name != "F32"]),
        ("a type for weights", [t for t in info.tensors if t.name != VOCABULARY_MAP and t.type_name in _NO_WEIGHTS]),
    ):
        if wrong:
            found = _shown([f"{tensor.name} {tensor.type_name}" for tensor in wrong])
            yield error("tensor_types", expected=expected, found=found, fix=f"{RECONVERT}: llama.cpp aborts on these")
            return
    yield ok("tensor_types", sorted({tensor.type_name for tensor in info.tensors}))


def _vocabulary_map(info: GGUFInfo, facts: DrafterFacts) -> Iterator[Finding]:
    """`d2t` names the target token of every row of a trimmed head; it is small, and read."""
    tensor = next((tensor for tensor in info.tensors if tensor.name == VOCABULARY_MAP), None)
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if tensor is None:
        return
    if tensor.type_name != "I64" or len(tensor.shape) != 1:
        yield error("d2t", expected="I64", found=tensor.type_name, fix=f"{RECONVERT}: llama.cpp aborts on it")
        return
    if not facts.own_head:
        yield error("d2t", expected="output.weight", found=None, fix=f"{RECONVERT}: the trimmed head is missing")
        return
    vocab_size = len(tokens) if isinstance(tokens, tuple) else 0
    ids = _read_ids(info, tensor)
    beyond = ids[(ids < 0) | (ids >= vocab_size)]
    if beyond.size:
        yield error("d2t", expected=f"ids below {vocab_size}", found=int(beyond[0]), fix=RECONVERT)
    elif np.unique(ids).size != ids.size:
        yield error("d2t", expected="each id once", found=f"{ids.size - np.unique(ids).size} repeated", fix=RECONVERT)
    else:
        yield ok("d2t", int(ids.size))


def _read_ids(info: GGUFInfo, tensor: TensorInfo) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    try:
        with info.path.open("rb") as file:
            file.seek(tensor.offset)
            return np.fromfile(file, np.dtype("<i8"), tensor.shape[0])
    except OSError as problem:
        raise GGUFError(f"Cannot read {info.path}: {problem.strerror or problem}.") from problem


def _shown(names: Sequence[str]) -> list[str]:
    more = len(names) - _SHOWN
    return [*names[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


_CHECKS: tuple[Callable[[GGUFInfo, DrafterFacts], Iterator[Finding]], ...] = (
    _keys,
    _block_size,
    _mask_token,
    _taps,
    _selector,
    _window,
    _causality,
    _rope,
    _embeddings,
    _vocabulary_map,
    _tensors,
    _types,
)
