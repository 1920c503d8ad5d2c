"""What a quantization_config of compressed-tensors says of stored weights, and which modules it says it of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.dialects.fields import Fields
from dflash2.converter.quantized.module import Module, Shape, fit_tile
from dflash2.errors import CheckpointError

_REGEX = "re:"
_MAX_REGEX = 1000
_EMBEDDING = "embed_tokens"
# Values of `actorder` that leave the file with a group for each column; others only guide the calibration.
_REORDERED = (True, "group", "dynamic")


@dataclass(frozen=True)
class Scheme:
    """One config group: how the weights of its `targets` are stored; `where` is its key in config.json.

    `reordered`: each column names its group (activation order), instead of neighbours sharing one.
    """

    where: str
    targets: tuple[str, ...]
    format: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int
    block: Shape
    reordered: bool

    def tile(self, shape: Shape) -> Shape:
        """Rows and columns that share a scale."""
        sizes = {"tensor": shape, "channel": (1, shape[1]), "block": self.block}
        return fit_tile(shape, sizes.get(self.strategy, (1, self.group_size)))


def read_scheme(top: Fields, name: str, group: object) -> Scheme | None:
    """The config group `name`, None if it leaves weights alone; raises CheckpointError naming the wrong key."""
    where = f"{top.prefix}config_groups.{name}"
    if not isinstance(group, dict):
        raise CheckpointError(f"{top.path}: {where!r} is not a JSON object; download it again.")
    fields = Fields(top.path, (group,), f"{where}.")
    weights = Fields(top.path, (fields.section("weights"),), f"{where}.weights.")
    if not weights.scopes[0]:
        return None
    if weights.get("dynamic") is True:
        raise weights.wrong("dynamic", "is true, which says nothing about stored weights")
    kind = (weights.text("type") or "int").lower()
    bits = 8 if weights.get("num_bits") is None else weights.integer("num_bits", maximum=64)
    strategy, group_size, block = _read_strategy(weights)
    format_name = fields.text("format") or top.text("format")
    if format_name is None:
        raise top.wrong("format", "is missing; download it again")
    return Scheme(
        where=f"{where}.weights",
        targets=read_names(fields, "targets"),
        format=format_name,
        bits=bits,
        kind=kind,
        symmetric=weights.flag("symmetric") is not False,
        strategy=strategy,
        group_size=group_size,
        block=block,
        reordered=weights.get("actorder") in _REORDERED,
    )


def _read_strategy(weights: Fields) -> tuple[str, int, Shape]:
    """Strategy, group size (1 if there are no groups) and block; the library's rule if the strategy is not named."""
    group_size = weights.optional_integer("group_size", minimum=-1)
    strategy = weights.text("strategy")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = strategy.lower()
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise weights.wrong("strategy", f"is {strategy!r}, which is not a strategy of stored weights")
    if strategy.endswith("group") and (group_size is None or group_size < 1):
        raise weights.wrong("group_size", f"is {group_size}, and strategy {strategy!r} needs a positive one")
    block = (1, 1)
    if strategy == "block":
        sizes = weights.integers("block_structure")
        if len(sizes) != 2 or not all(sizes):
            raise weights.wrong("block_structure", f"is {list(sizes)}, not two positive sizes")
        block = sizes[0], sizes[1]
    return strategy, group_size or 1, block


def read_names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names, empty if absent."""
    names = fields.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.wrong(key, "is not a list of names")
    return tuple(names)


def choose(schemes: tuple[Scheme, ...], module: Module, path: Path) -> Scheme:
    """The group whose targets name the module; a group for its class takes what no name takes."""
    if len(schemes) == 1:
        return schemes[0]
    kind = "Embedding" if module.name.endswith(_EMBEDDING) else "Linear"
    named = [scheme for scheme in schemes if matches(scheme.targets, module, path)]
    classes = [scheme for scheme in schemes if kind in scheme.targets]
    found = named or classes
    if len(found) != 1:
        raise CheckpointError(
            f"{module.label} is quantised, but {len(found)} groups of 'config_groups' in {path} name it instead of one."
        )
    return found[0]


def matches(targets: tuple[str, ...], module: Module, path: Path) -> bool:
    """Whether one of `targets` (names, or `re:` and a pattern for the start of a name) names the module."""
    return any(_matches_one(target, name, path) for target in targets for name in module.names)


def _matches_one(target: str, name: str, path: Path) -> bool:
    if not target.startswith(_REGEX):
        return target == name
    try:
        if len(target) > _MAX_REGEX:
            raise ValueError("too long")
        return re.match(target.removeprefix(_REGEX), name) is not None
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: {target[:60]!r} is not a regular expression ({error}).") from error
