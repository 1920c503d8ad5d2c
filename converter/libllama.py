"""A drafter in a type that only llama.cpp can encode: exact values go in, its quantiser's bytes come out.

llama.cpp sees tensors and the keys that it needs to load a drafter. The final file is written here, as every other:
the quantiser copies text only up to a zero byte, notices no full disk and orders tensors its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import LlamaFileType
from typing_extensions import override

from dflash2 import native
from dflash2.converter.encoding import EncodedTensor
from dflash2.converter.entry import Entry
from dflash2.converter.gguf_rows import GGUFRows
from dflash2.converter.plan import PlannedTensor
from dflash2.converter.type_plan import TypePlan
from dflash2.converter.writer import Progress, write_gguf
from dflash2.errors import NativeError
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info

_TOKENIZER = "tokenizer."
# Share of the whole work that writing the exact values, quantising and writing the result take.
_EXACT, _QUANTISING, _RESULT = (0.0, 0.25), (0.25, 0.9), (0.9, 1.0)


@contextmanager
def _quantised(
    beside: Path, metadata: Sequence[Entry], types: TypePlan, progress: Progress | None
) -> Iterator[tuple[EncodedTensor, ...]]:
    """The tensors of `types` as llama.cpp quantises them, in the same order; readable inside the block only.

    Two temporary files stand next to `beside`, and are gone afterwards. Raises OSError if they cannot be written,
    CheckpointError for values that no quantised type holds, NativeError if llama.cpp refuses.
    """
    exact, result = (beside.with_name(f"{beside.stem}.{part}.tmp") for part in ("exact", "quantised"))
    total = sum(tensor.n_bytes for tensor in types.tensors)
    keys = [entry for entry in metadata if not entry.key.startswith(_TOKENIZER)]
    # Where every matrix has its type already, the mixture is any quantised one.
    mixture = LlamaFileType.MOSTLY_Q8_0 if types.outtype.direct else types.outtype.file_type
    try:
        # What keeps its type need not go through the quantiser, which would refuse some of it.
        its_own = [tensor for tensor in types.tensors if not tensor.planned.source.fixed_type]
        write_gguf(exact, keys, its_own, progress=_scaled(progress, _EXACT, total))
        native.quantize_gguf(
            exact,
            result,
            file_type=mixture,
            tensor_types=types.fixed,
            progress=_scaled(progress, _QUANTISING, total),
        )
        exact.unlink()  # the larger of the two: the result needs the room
        yield _read_back(types, read_gguf_info(result))
    finally:
        exact.unlink(missing_ok=True)
        result.unlink(missing_ok=True)


def write_typed(
    path: Path,
    metadata: Sequence[Entry],
    types: TypePlan,
    *,
    hashed: Mapping[str, Callable[[], str]] | None = None,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Write the file that `types` plans; returns what a user should know of it.

    Arguments as those of `write_gguf`; raises as that and as `_quantised`.
    """
    if not types.by_llama_cpp:
        write_gguf(path, metadata, types.tensors, hashed=hashed, progress=progress)
        return types.notes({tensor.planned.name: tensor.type for tensor in types.tensors})
    total = sum(tensor.n_bytes for tensor in types.tensors)
    with _quantised(path, metadata, types, progress) as tensors:
        write_gguf(path, metadata, tensors, hashed=hashed, progress=_scaled(progress, _RESULT, total))
    return types.notes({tensor.planned.name: tensor.type for tensor in tensors})


def _scaled(progress: Progress | None, part: tuple[float, float], total: int) -> Progress | None:
    """`progress` of a whole of `total` bytes, from the progress of one part of it."""
    if progress is None:
        return None
    begin, end = part

    def report(done: int, of: int) -> None:
        progress(math.floor(total * (begin + (end - begin) * (done / of if of else 1.0))), total)

    return report


def _read_back(types: TypePlan, info: GGUFInfo) -> tuple[EncodedTensor, ...]:
    """The planned tensors with the quantiser's bytes; raises NativeError unless both agree on names and shapes."""
    found = {tensor.name: tensor for tensor in info.tensors}
    planned = {t.planned.name: t.planned for t in types.tensors if not t.planned.source.fixed_type}
    if found.keys() != planned.keys():
        name = sorted(found.keys() ^ planned.keys())[0]
        raise NativeError(f"llama.cpp's quantiser lost or added the tensor {name!r}; please report this.")
    for name, tensor in planned.items():
        # ggml has no trailing dimensions of one.
        if tuple(reversed(found[name].shape)) != tensor.shape and math.prod(found[name].shape) != tensor.n_elements:
            raise NativeError(f"llama.cpp's quantiser changed the shape of the tensor {name!r}; please report this.")
    return tuple(_quantised_as(tensor, info, found) for tensor in types.tensors)


def _quantised_as(tensor: EncodedTensor, info: GGUFInfo, found: Mapping[str, TensorInfo]) -> EncodedTensor:
    """The tensor with the quantiser's bytes, or as it is if it kept its type."""
    name = tensor.planned.name
    if name not in found:
        return tensor
    source = Quantised(info.path, found[name], tensor.planned.shape)
    return EncodedTensor(PlannedTensor(name, source), source.raw_type)


@dataclass(frozen=True)
class Quantised(GGUFRows):
    """A tensor as the quantiser left it, in the planned shape: ggml has no trailing dimensions of one."""

    outer_first: tuple[int, ...]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.outer_first

    @property
    @override
    def fixed_type(self) -> bool:
        return False
