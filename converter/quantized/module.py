"""The stored parts of one quantised module, and the checks that all readers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dflash2.converter.quantized.codes import SCALE_FLOATS, Code
from dflash2.converter.quantized.matrix import Scales, tiles_of
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.converter.sources import Source
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

Shape = tuple[int, int]


@dataclass(frozen=True)
class Module:
    """`name` as the converter knows it; `parts` by the last word of their names (`weight`, `weight_scale`, ...)."""

    name: str
    parts: Mapping[str, StoredTensor]
    _used: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """The module's name here and in the file; a configuration may use either."""
        return self.name, self._any_part.name.rpartition(".")[0]

    @property
    def label(self) -> str:
        """File and tensor, for messages about the whole module."""
        return f"{self._any_part.path}: tensor {self._any_part.name!r}"

    @property
    def _any_part(self) -> StoredTensor:
        return next(iter(self.parts.values()))

    def part(self, name: str, dtypes: Collection[str]) -> StoredTensor:
        """The part `name`; raises CheckpointError if it is missing or of another dtype."""
        tensor = self.parts.get(name)
        if tensor is None:
            missing = f"{self.names[1]}.{name}"
            raise CheckpointError(f"{self.label} has no {missing!r} beside it; download the checkpoint again.")
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} is stored as {tensor.dtype} instead of {' or '.join(dtypes)};"
                " the checkpoint is not of the format its configuration names."
            )
        self._used.add(name)
        return tensor

    def check_all_used(self) -> None:
        """Raise CheckpointError for a part that no reader asked for: it would change the weights."""
        for name, tensor in self.parts.items():
            if name not in self._used:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name!r} does not belong to the format that the configuration names;"
                    " converting without it would change the drafter."
                )


# Turns a module into the source of its weight.
ModuleReader = Callable[[Module], Source]


def matrix_shape(tensor: StoredTensor, code: Code) -> Shape:
    """Rows and columns of a matrix stored as bytes."""
    if len(tensor.shape) != 2 or not all(tensor.shape):
        raise UnsupportedCheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}; only matrices are dequantised."
        )
    return tensor.shape[0], tensor.shape[1] * code.per_byte


def check_shape(tensor: StoredTensor, *allowed: tuple[int, ...]) -> None:
    """Raise CheckpointError unless the tensor has one of the shapes that the weight implies."""
    if tensor.shape not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, the weight beside it implies"
            f" {wanted}; download the checkpoint again."
        )


def fit_tile(shape: Shape, tile: Shape) -> Shape:
    """A tile is never larger than the matrix."""
    return min(tile[0], shape[0]), min(tile[1], shape[1])


def grid_shapes(shape: Shape, tile: Shape) -> tuple[tuple[int, ...], ...]:
    """Shapes in which a grid is stored: [down, across], a column without its 1, a single number without any."""
    down, across = tiles_of(shape, tile)
    column = ((down,),) if across == 1 else ()
    single = ((),) if down == across == 1 else ()
    return (down, across), *column, *single


def read_scales(module: Module, part: str, shape: Shape, tile: Shape, dtypes: Collection[str] = SCALE_FLOATS) -> Scales:
    """The grid of scales in `part`, checked against the weight's `shape` and the `tile` of one scale."""
    tensor = module.part(part, dtypes)
    tile = fit_tile(shape, tile)
    check_shape(tensor, *grid_shapes(shape, tile))
    return Scales(tensor, tile)
