"""Drafter checkpoint and target GGUF in, drafter GGUF out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.checkpoint import read_tensors
from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects import read_config
from dflash2.converter.metadata import build_metadata
from dflash2.converter.outtypes import parse_outtype
from dflash2.converter.overrides import NO_OVERRIDES, Overrides
from dflash2.converter.plan import plan_tensors
from dflash2.converter.quantization import write_quantised
from dflash2.converter.target import check_pair, read_target
from dflash2.converter.type_plan import TensorTypes, plan_types
from dflash2.converter.writer import Progress, check_output, replacing


@dataclass(frozen=True)
class Conversion:
    """What was written: `n_bytes` is the size of the file, `notes` what a user should know of it."""

    output: Path
    config: DrafterConfig
    outtype: str
    n_tensors: int
    n_parameters: int
    n_bytes: int
    notes: tuple[str, ...]


def convert(
    drafter: Path,
    target: Path,
    output: Path,
    *,
    outtype: str = "bf16",
    tensor_types: TensorTypes = (),
    overrides: Overrides = NO_OVERRIDES,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a DFlash or DFlash 2 drafter checkpoint to GGUF.

    Args:
        drafter: folder with config.json and one or more safetensors files.
        target: GGUF of the model it drafts for; the tokenizer and the kind of rope are taken from it.
        output: GGUF file to write; an existing one is replaced, and only by a complete one.
        outtype: one of OUT_TYPES, in any case; vectors, norms and convolution bases stay F32.
        tensor_types: (pattern, type) pairs for single matrices; the first pattern found in a GGUF name decides, as a
            regular expression or a glob.
        overrides: what goes before the checkpoint's own values, or fills in for them.
        progress: called with (bytes of tensor data written, bytes of tensor data in all).

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or contradicts itself.
        UnsupportedCheckpointError: it asks for something a GGUF drafter cannot express.
        GGUFError: the target cannot be read or is no whole language model.
        TargetMismatchError: drafter and target do not belong together.
        OutputError: the output cannot be written, or its type is not possible.
        NativeError: llama.cpp, which quantises all but the direct types, is not there or refuses.
    """
    drafter, target, output = Path(drafter), Path(target), Path(output)
    wanted = parse_outtype(outtype)
    dialect, config = read_config(drafter, overrides)
    facts = read_target(target)
    pair_notes = check_pair(config, facts)
    stored = read_tensors(drafter, dialect.rename)
    plan = plan_tensors(drafter, config, stored)
    check_output(output, [target, drafter / "config.json", *(tensor.path for tensor in stored.values())])
    types = plan_types(plan.tensors, wanted, tensor_types)
    metadata = build_metadata(config, facts, drafter, wanted.file_type, plan.n_parameters)
    with replacing(output) as temporary:
        type_notes = write_quantised(temporary, metadata, types, progress)
    return Conversion(
        output=output,
        config=config,
        outtype=wanted.name,
        n_tensors=len(plan.tensors),
        n_parameters=plan.n_parameters,
        n_bytes=output.stat().st_size,
        notes=(*config.notes, *plan.notes, *pair_notes, *type_notes),
    )
