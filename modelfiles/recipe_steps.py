"""The steps of a recipe, what they look like in a POSIX shell, and as JSON values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_END = "END"
_CONTINUED = " \\\n    "
_WIDTH = 100


@dataclass(frozen=True)
class Run:
    """A program to run. Each part is one or more arguments that belong together, as an option and its value."""

    parts: tuple[tuple[str, ...], ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """All arguments, the program first."""
        return tuple(argument for part in self.parts for argument in part)

    def shell(self) -> str:
        """The command, quoted for a shell; one part a line if it is long."""
        line = shlex.join(self.argv)
        return line if len(line) <= _WIDTH else _CONTINUED.join(shlex.join(part) for part in self.parts)

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/engines.md."""
        return {"kind": "run", "argv": list(self.argv)}


@dataclass(frozen=True)
class Write:
    """A text file to write into the current folder."""

    path: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the file holds."""
        return "".join(f"{line}\n" for line in self.lines)

    def shell(self) -> str:
        """A here-document, in which nothing is expanded."""
        return f"cat > {shlex.quote(self.path)} <<'{_END}'\n{self.text}{_END}"

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/engines.md."""
        return {"kind": "write", "path": self.path, "text": self.text}


@dataclass(frozen=True)
class Choose:
    """Settings that an engine takes in its own window and by no command: `values` by name, at the place `where`."""

    where: str
    values: Mapping[str, object]

    def shell(self) -> str:
        """Comments."""
        settings = (f"#   {name} = {json.dumps(value)}" for name, value in self.values.items())
        return "\n".join([f"# {self.where}:", *settings])

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/engines.md."""
        return {"kind": "choose", "where": self.where, "values": dict(self.values)}


Step = Run | Write | Choose


def run(*parts: str | Sequence[str]) -> Run:
    """A command whose single strings are split at blanks, and whose sequences are arguments as they are."""
    return Run(tuple(tuple(part.split()) if isinstance(part, str) else tuple(part) for part in parts))


def script(steps: Sequence[Step]) -> str:
    """All steps as a shell script, each ending its line."""
    return "".join(f"{step.shell()}\n" for step in steps)
