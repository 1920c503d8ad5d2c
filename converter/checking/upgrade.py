"""A drafter GGUF with its metadata put right; the tensors' bytes are copied as they are.

Right means: as upstream spells it (forks), complete for the pair's rope (files made before 2026-08-27), and with what
the user says of a mask token or of causality. Nothing is guessed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.checking.forks import MASK_TOKEN, TARGET_LAYERS, Spelling, is_drafter, is_dspark, read_spelling
from dflash2.converter.entry import BOOL, INTEGERS, U32, Entry
from dflash2.converter.header import header
from dflash2.converter.targets.pair import Target, parts_of, read_target
from dflash2.converter.writer import Progress, check_output
from dflash2.errors import GGUFError, OutputError, TargetMismatchError
from dflash2.gguf_info import GGUFInfo, read_gguf_info
from dflash2.regular_file import system_errors
from dflash2.whole_file import replacing

_ARCHITECTURE = "general.architecture"
_ALIGNMENT = "general.alignment"
_SECTIONS = f"{DRAFTER_ARCHITECTURE}.rope.dimension_sections"
_CAUSAL_SWA = f"{DRAFTER_ARCHITECTURE}.attention.causal_swa"
_KEY_LENGTH = f"{DRAFTER_ARCHITECTURE}.attention.key_length"
_VALUE_LENGTH = f"{DRAFTER_ARCHITECTURE}.attention.value_length"
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Change:
    """One thing that differs in the new file: `what` names the key or tensor, `old` or `new` is None if not there."""

    what: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Upgrade:
    """What was done: `output` is None if there was nothing to do, and then nothing was written."""

    output: Path | None
    changes: tuple[Change, ...]
    n_bytes: int


@dataclass(frozen=True)
class Wishes:
    """What a user adds to a file that is silent; None leaves the file as it is.

    `tap_shift` is what a fork's tap ids lack to be layer inputs: 1 (the default) for Hugging Face's ids, 0 for ids
    that are shifted already.
    """

    target: Target | None = None
    mask_token_id: int | None = None
    causal_swa: bool | None = None
    tap_shift: int | None = None


@system_errors(GGUFError)
def upgrade(
    old: Path,
    output: Path | None = None,
    *,
    target: Path | None = None,
    mask_token_id: int | None = None,
    causal_swa: bool | None = None,
    tap_shift: int | None = None,
    in_place: bool = False,
    progress: Progress | None = None,
) -> Upgrade:
    """Rewrite the metadata of a drafter GGUF; tensors keep their bytes, order and types.

    Args:
        old: the drafter GGUF, of upstream or of a fork.
        output: file to write, another one than `old`; an existing one is replaced, and only by a complete one.
        target: GGUF of its target; adds what an M-RoPE target needs.
        mask_token_id: written where the file names none.
        causal_swa: whether a sliding layer's rows are blind to later rows of the block; no file of a fork or of
            upstream says it, config.json's `is_causal` does.
        tap_shift: added to a fork's tap ids; 1 unless given.
        in_place: replace `old` itself, instead of `output`.
        progress: called with (bytes of tensor data written, bytes of tensor data in all).

    Raises:
        GGUFError: `old` cannot be read, is no drafter, or lacks what nobody gave.
        TargetMismatchError: the target's hidden size or vocabulary is another one.
        OutputError: the output cannot be written.
    """
    old = Path(old)
    info = read_gguf_info(old)
    _check_upgradable(info)
    target = Path(target) if target is not None else None
    facts = read_target(target) if target is not None else None
    wishes = Wishes(facts, mask_token_id, causal_swa, tap_shift)
    new, changes = plan_upgrade(info, wishes)
    if not changes:
        return Upgrade(None, (), old.stat().st_size)
    place = _place(old, output, in_place, target)
    with replacing(place) as temporary:
        _copy(info, new, temporary, progress)
        if in_place:
            shutil.copymode(old, temporary)
    return Upgrade(place, changes, place.stat().st_size)


def plan_upgrade(info: GGUFInfo, wishes: Wishes) -> tuple[GGUFInfo, tuple[Change, ...]]:
    """The header the file should have, and how it differs from the one it has.

    Raises GGUFError if the file lacks something that `wishes` must settle, TargetMismatchError for a wrong target.
    """
    spelling = read_spelling(info, tap_shift=wishes.tap_shift)
    if spelling.ambiguous:
        raise GGUFError(
            f"{info.path}: 'dflash.target_layer_ids' {list(spelling.unshifted or ())} may count layers either way;"
            " say --tap-shift 1 if they are config.json's ids, 0 if one higher."
        )
    if spelling.fork is None and wishes.tap_shift is not None:
        raise GGUFError(f"{info.path} spells its taps as upstream does; they are never shifted again.")
    changes = list(_spelling_changes(info, spelling))
    metadata, types = dict(spelling.info.metadata), dict(spelling.info.value_types)
    for entry in _additions(spelling.info, wishes):
        before = metadata.get(entry.key)
        if before != entry.value:
            changes.append(Change(entry.key, None if before is None else _shown(before), _shown(entry.value)))
            metadata[entry.key], types[entry.key] = entry.value, entry.type
    return replace(spelling.info, metadata=metadata, value_types=types), tuple(changes)


def _check_upgradable(info: GGUFInfo) -> None:
    if not is_drafter(info):
        raise GGUFError(f"{info.path} is a {info.architecture or 'nameless'} model, no DFlash drafter; nothing to do.")
    if is_dspark(info):
        raise GGUFError(f"{info.path} is a DSpark drafter, another method; use upstream's draft-dspark.")
    if (info.integer("split.count") or 1) > 1:
        raise GGUFError(f"{info.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge first.")


def _spelling_changes(info: GGUFInfo, spelling: Spelling) -> Iterator[Change]:
    if spelling.fork is None:
        return
    if spelling.fork != DRAFTER_ARCHITECTURE:
        yield Change(_ARCHITECTURE, spelling.fork, DRAFTER_ARCHITECTURE)
    for old, new in spelling.keys:
        shifted = new == TARGET_LAYERS and spelling.unshifted is not None
        yield Change(
            old,
            f"{old} = {_shown(info.metadata[old])}" if shifted else old,
            f"{new} = {_shown(spelling.info.metadata[TARGET_LAYERS])}" if shifted else new,
        )
    for old, new in spelling.tensors:
        yield Change(f"tensor {old}", old, new)


def _additions(info: GGUFInfo, wishes: Wishes) -> Iterator[Entry]:
    """Keys to set, in upstream's spelling."""
    if wishes.target is not None:
        yield from _for_target(info, wishes.target)
    if wishes.mask_token_id is not None:
        yield from _mask_token(info, wishes.mask_token_id)
    if wishes.causal_swa is not None:
        yield Entry(_CAUSAL_SWA, wishes.causal_swa, BOOL)
    if _VALUE_LENGTH not in info.metadata and _values_as_wide_as_keys(info):
        # Without it the loader takes hidden size / heads.
        yield Entry(_VALUE_LENGTH, info.metadata[_KEY_LENGTH], U32)


def _for_target(info: GGUFInfo, target: Target) -> Iterator[Entry]:
    hidden = info.integer(info.own("embedding_length"))
    if hidden != target.hidden_size:
        raise TargetMismatchError(
            f"{target.label} has the hidden size {target.hidden_size}, {info.path} is for {hidden};"
            " give its own target."
        )
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, tuple) and len(tokens) != target.vocab_size:
        raise TargetMismatchError(
            f"{target.label} has {target.vocab_size} tokens, {info.path} {len(tokens)}; give its own target."
        )
    if target.uses_mrope and _SECTIONS not in info.metadata:
        head_dim = info.integer(_KEY_LENGTH)
        if head_dim is None:
            raise GGUFError(f"{info.path} has no {_KEY_LENGTH!r}; convert the drafter's checkpoint again.")
        yield Entry(_SECTIONS, (head_dim // 2, 0, 0, 0), INTEGERS)


def _mask_token(info: GGUFInfo, mask_token_id: int) -> Iterator[Entry]:
    named = info.integer(MASK_TOKEN)
    if named is not None and named != mask_token_id:
        raise GGUFError(
            f"{info.path} names the mask token {named}, not {mask_token_id}; leave --mask-token-id out or convert the"
            " checkpoint again."
        )
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if mask_token_id < 0 or (isinstance(tokens, tuple) and mask_token_id >= len(tokens)):
        raise GGUFError(f"{info.path}: the mask token {mask_token_id} is outside its vocabulary; give its id.")
    yield Entry(MASK_TOKEN, mask_token_id, U32)


def _values_as_wide_as_keys(info: GGUFInfo) -> bool:
    shapes = {tensor.name: tensor.shape for tensor in info.tensors}
    keys = shapes.get("blk.0.attn_k.weight")
    return keys is not None and keys == shapes.get("blk.0.attn_v.weight") and _KEY_LENGTH in info.metadata


def _place(old: Path, output: Path | None, in_place: bool, target: Path | None) -> Path:
    inputs = [] if target is None else [*parts_of(target)]
    folders = [target] if target is not None and target.is_dir() else []
    if in_place:
        if output is not None:
            raise OutputError("--in-place replaces the file itself; leave out the output.")
        check_output(old, inputs, folders)
        return old.resolve()  # the file behind a link, not the link
    if output is None:
        raise OutputError(f"{old} needs an upgrade; name the file to write with -o, or replace it with --in-place.")
    if output.exists() and output.samefile(old):
        raise OutputError(f"Cannot write {output}: it is the file to upgrade; give another path, or use --in-place.")
    check_output(output, [old, *inputs], folders)
    return output


def _copy(old: GGUFInfo, new: GGUFInfo, path: Path, progress: Progress | None) -> None:
    """A new header before the old tensor data, which keeps its bytes and its alignment."""
    entries = [Entry(key, value, new.value_types[key]) for key, value in new.metadata.items() if key != _ARCHITECTURE]
    begin = min((tensor.offset for tensor in old.tensors), default=old.path.stat().st_size)
    table = [
        (tensor.name, tuple(reversed(tensor.shape)), GGMLQuantizationType[tensor.type_name], tensor.offset - begin)
        for tensor in new.tensors
    ]
    head = header(DRAFTER_ARCHITECTURE, entries, table)
    with old.path.open("rb", buffering=0) as source, path.open("wb") as file:
        file.write(head)
        file.write(bytes(-len(head) % _alignment(old.metadata)))
        file.flush()
        _copy_data(source, file, begin, progress)


def _copy_data(source: FileIO, file: BinaryIO, begin: int, progress: Progress | None) -> None:
    """Everything from `begin` on; the kernel copies where it can."""
    total = os.fstat(source.fileno()).st_size - begin
    source.seek(begin)
    done = 0
    step = _in_kernel
    while done < total:
        try:
            copied = step(source, file, min(_CHUNK_BYTES, total - done))
        except OSError:
            if step is _through_memory:
                raise
            step = _through_memory  # other file systems, other systems: nothing of this step was written
            continue
        if not copied:
            raise GGUFError(f"{source.name!s} is truncated: {total - done} bytes are missing; copy it again.")
        done += copied
        if progress:
            progress(done, total)


def _in_kernel(source: FileIO, file: BinaryIO, count: int) -> int:
    copy: Callable[[int, int, int], int] | None = getattr(os, "copy_file_range", None)
    if copy is None:
        raise OSError("no copy_file_range")
    return copy(source.fileno(), file.fileno(), count)


def _through_memory(source: FileIO, file: BinaryIO, count: int) -> int:
    place = os.lseek(source.fileno(), 0, os.SEEK_CUR)
    data = memoryview(os.read(source.fileno(), count))
    written = os.write(file.fileno(), data)
    os.lseek(source.fileno(), place + written, os.SEEK_SET)
    return written


def _alignment(metadata: Mapping[str, object]) -> int:
    value = metadata.get(_ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    return value if isinstance(value, int) else GGUF_DEFAULT_ALIGNMENT


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
