"""Values of a file written by `torch.save`, read without unpickling: no name in it is imported, nothing is called.

Such a file is a zip of one pickle (`data.pkl`) and of raw storages (`data/0`, ...). The pickle's opcodes are
interpreted by a stack machine that knows containers, numbers, text and the one way PyTorch spells a tensor; whatever
else it meets is refused by name.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash2.errors import CheckpointError, UnsupportedCheckpointError
from dflash2.regular_file import open_file

Array = npt.NDArray[Any]

_MAX_PICKLE_BYTES = 1 << 20
_MAX_STORAGE_BYTES = 64 << 20
_MAX_OPCODES = 100_000
_STORAGES = {
    "torch FloatStorage": "<f4",
    "torch DoubleStorage": "<f8",
    "torch HalfStorage": "<f2",
    "torch BFloat16Storage": "<u2",
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
}
_BFLOAT16 = "torch BFloat16Storage"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_ORDERED = "collections OrderedDict"
_KNOWN = {*_STORAGES, _TENSOR, _PARAMETER, _ORDERED}
_MARK = object()


@dataclass(frozen=True)
class _Global:
    """A name that the pickle mentions; it stays a name."""

    name: str


def read_torch_file(path: Path) -> Any:
    """Containers, numbers and text as Python's, tensors as NumPy arrays (BF16 as F32).

    Raises CheckpointError for a damaged file, UnsupportedCheckpointError for one that holds anything else.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            root = _root(path, archive)
            code = _member(path, archive, f"{root}/data.pkl", _MAX_PICKLE_BYTES)
            machine = _Machine(path, lambda key: _member(path, archive, f"{root}/data/{key}", _MAX_STORAGE_BYTES))
            return machine.run(code)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is not a zip file as torch.save writes it; download it again, or save it with a newer PyTorch."
        ) from error
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error


def _root(path: Path, archive: zipfile.ZipFile) -> str:
    roots = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise CheckpointError(f"{path} has {len(roots)} files data.pkl instead of one; it is not from torch.save.")
    return roots[0]


def _member(path: Path, archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {name!r}; download it again.") from error
    # PyTorch stores without compression; a compressed member could unpack to any size.
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > limit:
        raise UnsupportedCheckpointError(f"{path}: {name!r} is compressed or larger than {limit} bytes; not read.")
    return archive.read(info)


@dataclass
class _Machine:
    """The pickle's stack machine, without the opcodes that import or call."""

    path: Path
    storage: Callable[[str], bytes]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, code: bytes) -> Any:
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(code)):
                if count > _MAX_OPCODES:
                    raise self._refuse(f"more than {_MAX_OPCODES} opcodes")
                if opcode.name == "STOP":
                    return self.stack.pop()
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise self._refuse(f"the pickle opcode {opcode.name}")
                step(self, argument)
        # What a damaged or hostile pickle makes of the stack, the memo or its own text.
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{self.path} has a damaged pickle ({error}); download it again.") from error
        raise CheckpointError(f"{self.path} has a pickle without an end; download it again.")

    def _refuse(self, what: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(f"{self.path} holds {what}, which is more than tensors; it is not read.")

    def to_mark(self) -> list[Any]:
        """Everything above the last mark, which goes too."""
        at = len(self.stack) - 1 - next(i for i, item in enumerate(reversed(self.stack)) if item is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mention(self, name: str) -> None:
        if name not in _KNOWN:
            raise self._refuse(f"the name {name.replace(' ', '.')!r}")
        self.stack.append(_Global(name))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def take(self, n: int) -> None:
        items = tuple(self.stack[len(self.stack) - n :])
        del self.stack[len(self.stack) - n :]
        self.stack.append(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items for what is not a dictionary")
        target.update(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise TypeError("items for what is not a list")
        self.stack[-1].extend(items)

    def find_storage(self) -> None:
        kind, storage, key, _device, n = self.stack.pop()
        if kind != "storage" or not isinstance(key, str) or not isinstance(storage, _Global):
            raise TypeError("a reference to what is not a storage")
        values = np.frombuffer(self.storage(key), _STORAGES[storage.name])
        if len(values) != n:
            raise ValueError(f"storage {key} has {len(values)} values instead of {n}")
        wide = (values.astype(np.uint32) << 16).view(np.float32) if storage.name == _BFLOAT16 else values
        self.stack.append(wide)

    def rebuild(self) -> None:
        """The three calls PyTorch writes: a tensor of a storage, a parameter of a tensor, an empty dictionary."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if function == _Global(_ORDERED) and arguments == ():
            self.stack.append({})
        elif function == _Global(_PARAMETER):
            self.stack.append(arguments[0])
        elif function == _Global(_TENSOR):
            self.stack.append(_tensor(*arguments[:4]))
        else:
            raise self._refuse("a call that makes no tensor")


def _tensor(storage: Array, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """A contiguous tensor; others would need strides, which a damaged file could lead out of the storage."""
    expected = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if not isinstance(storage, np.ndarray) or strides != expected:
        raise ValueError("a tensor that is not contiguous")
    n = math.prod(shape)
    if min((*shape, offset)) < 0 or offset + n > len(storage):
        raise ValueError(f"a tensor of {n} values at {offset} in a storage of {len(storage)}")
    return storage[offset : offset + n].reshape(shape)


_Step = Callable[[_Machine, Any], None]


def _constant(value: Any) -> _Step:
    return lambda machine, _: machine.push(value)


def _pushed(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


_STEPS: dict[str, _Step] = {
    "PROTO": lambda _machine, _: None,
    "FRAME": lambda _machine, _: None,
    "MARK": _constant(_MARK),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _pushed),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _pushed),
    "GLOBAL": lambda machine, name: machine.mention(name),
    "STACK_GLOBAL": lambda machine, _: machine.mention(" ".join([machine.stack.pop(-2), machine.stack.pop()])),
    "BINPUT": lambda machine, index: machine.put(index),
    "LONG_BINPUT": lambda machine, index: machine.put(index),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "TUPLE1": lambda machine, _: machine.take(1),
    "TUPLE2": lambda machine, _: machine.take(2),
    "TUPLE3": lambda machine, _: machine.take(3),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.to_mark()),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.to_mark()),
    "BINPERSID": lambda machine, _: machine.find_storage(),
    "REDUCE": lambda machine, _: machine.rebuild(),
}
