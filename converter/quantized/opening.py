"""From config.json and stored tensors to one source per weight, quantised or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.dialects.fields import Fields, JsonObject, load_json_object
from dflash2.converter.quantized import compressed_tensors, fp8, modelopt
from dflash2.converter.quantized.module import Module, ModuleReader
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.converter.sources import Source, Stored
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

_CONFIG = "config.json"
_MODELOPT_CONFIG = "hf_quant_config.json"
_CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class _Method:
    """A quantisation method: how its description is read, and which parts beside `weight` its modules have."""

    read: Callable[[Fields], ModuleReader]
    parts: tuple[str, ...]


_COMPRESSED_TENSORS = _Method(compressed_tensors.read_compressed_tensors, compressed_tensors.PARTS)
_MODELOPT = _Method(modelopt.read_modelopt, modelopt.PARTS)
_METHODS = {
    "compressed-tensors": _COMPRESSED_TENSORS,
    "fp8": _Method(fp8.read_fp8, fp8.PARTS),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "modelopt_mixed": _MODELOPT,
}
# Methods that are known and not read, and the library that can dequantise them.
_REFUSED = {
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitnet": "transformers",
    "bitsandbytes": "transformers and bitsandbytes",
    "eetq": "eetq",
    "fbgemm_fp8": "transformers",
    "fp_quant": "fp_quant",
    "gptq": "gptqmodel",
    "higgs": "transformers",
    "hqq": "hqq",
    "intel/auto-round": "auto-round",
    "mxfp4": "transformers",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
    "spqr": "spqr_quant",
    "torchao": "torchao",
    "vptq": "vptq",
}
# Scales of activations and of the cache: they say how a kernel may compute, not what the weights are.
_ACTIVATION_PARTS = (
    "activation_scale", "input_global_scale", "input_scale", "input_zero_point", "k_scale", "output_scale",
    "output_zero_point", "q_scale", "v_scale",
)  # fmt: skip
# Parts that only quantised modules have, whatever the method.
_WEIGHT_PARTS = tuple(sorted({part for method in _METHODS.values() for part in method.parts}))
# Dtypes in which weights are codes, nothing without a scale.
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")


def open_quantized(
    config: JsonObject, folder: Path, stored: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Source], tuple[str, ...]]:
    """A source for every weight of a checkpoint, dequantised where it is quantised.

    Args:
        config: the whole config.json.
        folder: the checkpoint's folder, for messages and hf_quant_config.json.
        stored: the stored tensors by canonical name.

    Returns:
        Sources by logical name (`layers.0.self_attn.q_proj.weight`; tensors that are not quantised keep their name),
        and notes on what was dequantised and left out.

    Raises:
        CheckpointError: a scale is missing or does not fit, a part belongs to no format, a value is damaged.
        UnsupportedCheckpointError: the method or format is not read; says what to do instead.
    """
    description = _describe(config, folder)
    if description is None:
        _refuse_undescribed(folder, stored)
        return {name: Stored(tensor) for name, tensor in stored.items()}, ()
    name, method, fields = description
    reader = method.read(fields)
    sources: dict[str, Source] = {}
    modules: dict[str, dict[str, StoredTensor]] = {}
    dropped: set[str] = set()
    for tensor_name, tensor in stored.items():
        module, _, part = tensor_name.rpartition(".")
        if part in _ACTIVATION_PARTS:
            dropped.add(part)
        elif part in _WEIGHT_PARTS:
            modules.setdefault(module, {})[part] = tensor
        else:
            sources[tensor_name] = Stored(tensor)
    for module, parts in modules.items():
        weight_name = f"{module}.weight"
        if weight_name in stored:
            parts["weight"] = stored[weight_name]
        entry = Module(module, parts)
        sources[weight_name] = reader(entry)
        entry.check_all_used()
    _refuse_unscaled(sources)
    return sources, _notes(name, len(modules), dropped)


def _describe(config: JsonObject, folder: Path) -> tuple[str, _Method, Fields] | None:
    """The method's name, the method, and its description; None if the checkpoint is not quantised."""
    top = Fields(folder / _CONFIG, (config,))
    found = [(key, section) for key in _CONFIG_KEYS if (section := top.section(key))]
    if not found:
        return _describe_modelopt(folder)
    key, section = found[0]
    fields = Fields(top.path, (section,), f"{key}.")
    name = fields.text("quant_method") or _default_method(fields)
    if name in _REFUSED:
        raise UnsupportedCheckpointError(
            f"{top.path}: the checkpoint is quantised with {name}, which is not read; convert the BF16, F16 or F32"
            f" original, or dequantise it with {_REFUSED[name]} first."
        )
    if name not in _METHODS:
        raise UnsupportedCheckpointError(
            f"{top.path}: the quantisation method {name[:60]!r} is not known (known: {', '.join(_METHODS)}); convert"
            " the BF16, F16 or F32 original."
        )
    return name, _METHODS[name], fields


def _default_method(fields: Fields) -> str:
    """Early files of compressed-tensors name no method; their groups tell."""
    if not fields.section("config_groups"):
        raise fields.wrong("quant_method", "is missing; convert the BF16, F16 or F32 original")
    return "compressed-tensors"


def _describe_modelopt(folder: Path) -> tuple[str, _Method, Fields] | None:
    path = folder / _MODELOPT_CONFIG
    if not path.is_file():
        return None
    top = Fields(path, (load_json_object(path),))
    producer = top.section("producer").get("name")
    if producer != "modelopt":
        raise UnsupportedCheckpointError(
            f"{path}: the producer {str(producer)[:60]!r} is not known (known: modelopt); convert the BF16 original."
        )
    return "modelopt", _MODELOPT, Fields(path, (top.section("quantization"),), "quantization.")


def _refuse_undescribed(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    for name, tensor in stored.items():
        if name.rpartition(".")[2] in _WEIGHT_PARTS:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} belongs to a quantised weight, but neither {_CONFIG} nor"
                f" {_MODELOPT_CONFIG} in {folder} says how it is quantised; download them."
            )


def _refuse_unscaled(sources: Mapping[str, Source]) -> None:
    for name, source in sources.items():
        if isinstance(source, Stored) and name.endswith(".weight") and source.tensor.dtype in _CODES:
            raise CheckpointError(
                f"{source.label} is stored as {source.tensor.dtype} and has no scale beside it; download the checkpoint"
                " again."
            )


def _notes(method: str, n_modules: int, dropped: set[str]) -> tuple[str, ...]:
    notes = []
    if n_modules:
        notes.append(f"{n_modules} weights dequantised ({method}).")
    if dropped:
        notes.append(f"{', '.join(sorted(dropped))} left out: scales of activations or of the cache, not of weights.")
    return tuple(notes)
