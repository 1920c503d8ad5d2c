"""Drafter GGUFs written for forks of llama.cpp, read as upstream would have written them.

Seen in public converters, servers and reports (llama.cpp issue 25116, beellama.cpp issue 4): the architecture
`dflash-draft` (or with a target in front), keys one level deeper under `dflash.` or `dflash2.`, target layer ids as
Hugging Face counts them, and tensor names of their own. Tensor data is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gguf.constants import GGUFValueType

from dflash2.constants import DRAFTER_ARCHITECTURE, FORK_DRAFTER_ARCHITECTURES
from dflash2.errors import GGUFError
from dflash2.gguf_info import GGUFInfo, MetadataValue, ValueType

MASK_TOKEN = "tokenizer.ggml.mask_token_id"
TARGET_LAYERS = f"{DRAFTER_ARCHITECTURE}.target_layers"

_ARCHITECTURE = "general.architecture"
_NESTED = ("dflash.", "dflash2.")
_FORK_TAPS = "target_layer_ids"
# Suffix below the architecture, without the nesting: upstream's key; None drops what follows from other keys.
_KEYS: dict[str, str | None] = {
    _FORK_TAPS: TARGET_LAYERS,
    "mask_token_id": MASK_TOKEN,
    "conv_taps": f"{DRAFTER_ARCHITECTURE}.conv_kernel_size",
    "n_target_features": None,
    "n_target_layers": None,
}
_TENSORS = {
    "dflash_fc.weight": "fc.weight",
    "dflash.fc.weight": "fc.weight",
    "dflash_hidden_norm.weight": "enc.output_norm.weight",
    "dflash.hidden_norm.weight": "enc.output_norm.weight",
    "selector_hproj.weight": "selector_hidden.weight",
    "dflash.selector.hproj.weight": "selector_hidden.weight",
    "selector_pred": "selector_predecessor.weight",
    "dflash.selector.pred_cb": "selector_predecessor.weight",
    "selector_succ": "selector_successor.weight",
    "dflash.selector.succ_cb": "selector_successor.weight",
}
_LAYER_TENSOR = re.compile(r"(?P<layer>blk\.\d+\.)(?P<name>.+)")
_LAYER_TENSORS = {
    "post_attention_norm.weight": "ffn_norm.weight",
    "attn_conv.base": "attn_conv_base",
    "attn_conv.proj.weight": "attn_conv_proj.weight",
    "ffn_conv.base": "ffn_conv_base",
    "ffn_conv.proj.weight": "ffn_conv_proj.weight",
}
# Marks of DSpark, another method under the same architecture.
_DSPARK_KEY = "dspark."
_DSPARK_TENSORS = ("markov_w1.weight", "dflash.dspark.confidence.weight")


@dataclass(frozen=True)
class Spelling:
    """How a drafter GGUF differs from upstream's spelling.

    `info` is the file as upstream would have written it. `unshifted` are the tap ids as the fork counts them, None
    for a file of upstream's, and `ambiguous` says that nothing in the file tells how it counts.
    """

    info: GGUFInfo
    fork: str | None
    keys: tuple[tuple[str, str | None], ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    unshifted: tuple[int, ...] | None = None
    ambiguous: bool = False


def is_drafter(info: GGUFInfo) -> bool:
    """Whether the file is a DFlash drafter, of upstream or of a fork."""
    return info.architecture == DRAFTER_ARCHITECTURE or is_fork(info)


def is_fork(info: GGUFInfo) -> bool:
    """Whether the file is a drafter that stock llama.cpp refuses for its spelling."""
    if info.architecture == DRAFTER_ARCHITECTURE:
        return f"{DRAFTER_ARCHITECTURE}.{_FORK_TAPS}" in info.metadata and TARGET_LAYERS not in info.metadata
    return info.architecture in FORK_DRAFTER_ARCHITECTURES


def is_dspark(info: GGUFInfo) -> bool:
    """Whether the file is a DSpark drafter (a Markov head on a DFlash backbone)."""
    prefix = info.own(_DSPARK_KEY)
    return any(name in info.tensor_names for name in _DSPARK_TENSORS) or any(
        key.startswith(prefix) for key in info.metadata
    )


def read_spelling(info: GGUFInfo, *, tap_shift: int | None = None) -> Spelling:
    """The drafter in upstream's spelling; `tap_shift` is added to a fork's tap ids.

    Default: 1, since forks keep Hugging Face's ids. A file of upstream's is never shifted. Under upstream's
    architecture name `target_layer_ids` comes from drafts of the pull request that added it, which counted both
    ways: there the shift must be given (`ambiguous` until then). Raises GGUFError if two keys become one.
    """
    if not is_fork(info):
        return Spelling(info, None)
    early = info.architecture == DRAFTER_ARCHITECTURE
    shift = 1 if tap_shift is None else tap_shift
    metadata: dict[str, MetadataValue] = {}
    types: dict[str, ValueType] = {}
    renamed: list[tuple[str, str | None]] = []
    unshifted: tuple[int, ...] | None = None
    for key, value in info.metadata.items():
        new = _upstream_key(info.architecture, key)
        if new != key:
            renamed.append((key, new))
        if new is None:
            continue
        if new in metadata:
            raise GGUFError(f"{info.path}: {key!r} says the same as another key ({new!r}); the file is damaged.")
        metadata[new], types[new] = value, info.value_types[key]
        if new == TARGET_LAYERS and isinstance(value, tuple):
            unshifted = tuple(item for item in value if isinstance(item, int))
            metadata[new] = tuple(tap + shift for tap in unshifted)
            types[new] = ValueType(GGUFValueType.ARRAY, GGUFValueType.INT32)
    metadata[_ARCHITECTURE] = DRAFTER_ARCHITECTURE
    names = [(tensor.name, _upstream_tensor(tensor.name)) for tensor in info.tensors]
    tensors = tuple(replace(tensor, name=new) for tensor, (_, new) in zip(info.tensors, names, strict=True))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise GGUFError(f"{info.path} holds a tensor under two names; the file is damaged.")
    return Spelling(
        info=replace(info, metadata=metadata, value_types=types, tensors=tensors),
        fork=info.architecture,
        keys=tuple(renamed),
        tensors=tuple((old, new) for old, new in names if old != new),
        unshifted=unshifted,
        ambiguous=early and tap_shift is None,
    )


def _upstream_key(architecture: str, key: str) -> str | None:
    prefix = f"{architecture}."
    if not key.startswith(prefix):
        return key
    suffix = key.removeprefix(prefix)
    for nested in _NESTED:
        suffix = suffix.removeprefix(nested)
    return _KEYS.get(suffix, f"{DRAFTER_ARCHITECTURE}.{suffix}")


def _upstream_tensor(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match["name"] in _LAYER_TENSORS:
        return match["layer"] + _LAYER_TENSORS[match["name"]]
    return name
