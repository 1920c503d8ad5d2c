"""Drafter checkpoint and target GGUF in, drafter GGUF out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.carried.carry import with_target_tensors
from dflash2.converter.carried.draft_vocabulary import DraftVocabulary
from dflash2.converter.checkpoint import read_tensors
from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.fields import load_json_object
from dflash2.converter.dialects.overrides import NO_OVERRIDES, Overrides
from dflash2.converter.dialects.table import locate, read_config
from dflash2.converter.libllama import write_typed
from dflash2.converter.metadata import build_metadata
from dflash2.converter.outtypes import parse_outtype
from dflash2.converter.plan import plan_tensors
from dflash2.converter.provenance import input_files, license_notes
from dflash2.converter.quantized import open_quantized
from dflash2.converter.targets.pair import check_pair, check_tokens, parts_of, read_target
from dflash2.converter.type_plan import TensorTypes, plan_types
from dflash2.converter.writer import Progress, check_output
from dflash2.errors import CheckpointError
from dflash2.hub import Snapshot
from dflash2.regular_file import system_errors
from dflash2.whole_file import replacing


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


@system_errors(CheckpointError)
def convert(
    drafter: Path | Snapshot,
    target: Path | Snapshot,
    output: Path,
    *,
    outtype: str = "bf16",
    tensor_types: TensorTypes = (),
    overrides: Overrides = NO_OVERRIDES,
    embed_target_head: bool = False,
    draft_vocab: DraftVocabulary | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a DFlash or DFlash 2 drafter checkpoint to GGUF.

    Args:
        drafter: folder with config.json and one or more safetensors files, the folder above it (see
            layout), or what `hub.resolve_drafter` found.
        target: GGUF of the model it drafts for (of a split one the first file), or its Hugging Face folder, of which
            config.json and the tokenizer files are read; the tokenizer and the kind of rope are taken from it.
            Or what `hub.resolve_target` found.
        output: GGUF file to write; an existing one is replaced, and only by a complete one.
        outtype: one of OUT_TYPES, in any case; vectors, norms and convolution bases stay F32.
        tensor_types: (pattern, type) pairs for single matrices; the first pattern found in a GGUF name decides, as a
            regular expression or a glob.
        overrides: what goes before the checkpoint's own values, or fills in for them.
        embed_target_head: carry the target's embeddings and head, for a drafter on a device that the target does not
            use; bytes as they are, whatever `outtype` says.
        draft_vocab: carry a head of these tokens alone, likewise.
        progress: called with (bytes of tensor data written, bytes of tensor data in all).

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or contradicts itself.
        UnsupportedCheckpointError: it asks for something a GGUF drafter cannot express.
        GGUFError: the target cannot be read or is no whole language model.
        TargetMismatchError: drafter and target do not belong together.
        DraftVocabularyError: the tokens of a trimmed head cannot be chosen.
        OutputError: the output cannot be written, or its type is not possible.
        NativeError: llama.cpp, which quantises all but the direct types and tokenises text for `draft_vocab`, is not
            there or refuses.
    """
    drafter_source, target_source, output = _source(drafter), _source(target), Path(output)
    drafter, target = drafter_source.path, target_source.path
    wanted = parse_outtype(outtype)
    dialect, config = read_config(drafter, overrides)
    facts = read_target(target, target_source.repo_id)
    pair_notes = check_pair(config, facts)
    check_tokens(drafter, facts)
    stored = read_tensors(drafter, dialect.rename)
    place = locate(drafter)
    sources, quantization_notes = open_quantized(load_json_object(place.config), place.weights, stored)
    own = plan_tensors(drafter, config, sources)
    plan, carried = with_target_tensors(
        own,
        drafter,
        config,
        target,
        whole=embed_target_head,
        draft_vocab=draft_vocab,
        mask_embedding=config.mask_embedding,
    )
    read = {place.config, *place.beside_weights(), *(tensor.path for tensor in stored.values())}
    fetched = (file.path for file in (*drafter_source.files, *target_source.files))
    folders = [folder for folder in (drafter, place.weights, target) if folder.is_dir()]
    check_output(output, [*parts_of(target), *read, *carried, *fetched], folders)
    types = plan_types(plan.tensors, wanted, tensor_types)
    inputs = input_files(drafter_source, read, target_source)
    metadata, hashed = build_metadata(
        config,
        facts,
        drafter_source,
        wanted.file_type,
        plan.n_parameters,
        target_source=target_source,
        inputs=inputs,
    )
    with replacing(output) as temporary:
        type_notes = write_typed(temporary, metadata, types, hashed=hashed, progress=progress)
    return Conversion(
        output=output,
        config=config,
        outtype=wanted.name,
        n_tensors=len(plan.tensors),
        n_parameters=plan.n_parameters,
        n_bytes=output.stat().st_size,
        notes=(*config.notes, *quantization_notes, *plan.notes, *pair_notes, *type_notes, *license_notes(drafter)),
    )


def _source(given: Path | Snapshot) -> Snapshot:
    return given if isinstance(given, Snapshot) else Snapshot(Path(given))
