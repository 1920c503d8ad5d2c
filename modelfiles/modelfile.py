"""The typed Modelfile: what Ollama reads from a text, and a text from which it reads exactly this."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.errors import ModelfileError
from dflash2.modelfiles.grammar import KEYWORDS, MODEL, Command, decode, scan, write_command
from dflash2.modelfiles.parameters import DEPRECATED, STOP, Value, parameter_value

DRAFT = "draft"
_COMMANDS = frozenset(KEYWORDS) - {"from", "parameter"} | {MODEL}
# As Go's semver package: shorter than three numbers only without a suffix, no leading zeros but in a build's name.
_NUMBER = "(?:0|[1-9][0-9]*)"
_PRERELEASE = rf"(?:{_NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_BUILD = "[0-9A-Za-z-]+"
_VERSION = re.compile(
    rf"v?{_NUMBER}(?:\.{_NUMBER}(?:\.{_NUMBER}(?:-{_PRERELEASE}(?:\.{_PRERELEASE})*)?(?:\+{_BUILD}(?:\.{_BUILD})*)?)?)?"
)


@dataclass(frozen=True)
class Modelfile:
    """The commands of a Modelfile in their order, values unquoted."""

    commands: tuple[Command, ...]

    @classmethod
    def parse(cls, source: str | bytes) -> Modelfile:
        """What Ollama's parser makes of `source` (UTF-8 or UTF-16).

        Raises ModelfileError with exactly its message.
        """
        return cls(tuple(found.command for found in scan(decode(source))))

    def render(self) -> str:
        """The text: `parse` gives an equal Modelfile for it.

        Written as Ollama writes it (`ollama show --modelfile`) wherever that reads back as the same. Raises
        ModelfileError for a value that no text keeps, and without FROM.
        """
        if not self.values(MODEL):
            raise ModelfileError("A Modelfile needs a FROM; name the target.")
        return "".join(f"{write_command(command)}\n" for command in self.commands)

    def values(self, name: str) -> tuple[str, ...]:
        """All values of the commands called `name` (`model` for FROM, a parameter's own name), in their order."""
        return tuple(command.args for command in self.commands if command.name == name)

    def value(self, name: str) -> str | None:
        """The value that counts: the last one; None if there is none."""
        return self.values(name)[-1] if self.values(name) else None

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        """(role, text) of every MESSAGE."""
        cuts = (args.partition(": ") for args in self.values("message"))
        return tuple((role, text) for role, _, text in cuts)

    @property
    def parameters(self) -> dict[str, Value | tuple[str, ...]]:
        """Parameters by name as `ollama create` reads them: the last value counts, `stop` has all of its own.

        Deprecated ones are left out, as there. Raises ModelfileError in Ollama's words.
        """
        found: dict[str, Value | tuple[str, ...]] = {}
        for command in self.commands:
            if command.name in _COMMANDS or command.name in DEPRECATED:
                continue
            found[command.name] = parameter_value(command.name, command.args)
        if STOP in found:
            found[STOP] = self.values(STOP)
        return found

    def check_values(self) -> None:
        """Raise ModelfileError, in Ollama's words, for what it would refuse after parsing: parameters, REQUIRES."""
        _ = self.parameters
        for version in self.values("requires"):
            if not _VERSION.fullmatch(version):
                raise ModelfileError("requires must be a valid semver (e.g. 0.14.0)")

    def with_values(self, name: str, values: Sequence[str]) -> Modelfile:
        """A copy whose commands called `name` have exactly `values`.

        They take the places of those that are there, further ones follow the last of them. Without any, DRAFT follows
        FROM and all else goes to the end.
        """
        waiting = list(values)
        commands: list[Command] = []
        place = 0
        for command in self.commands:
            if command.name != name:
                commands.append(command)
            elif waiting:
                commands.append(Command(name, waiting.pop(0)))
            if command.name == name or (not self.values(name) and follows(name, command.name)):
                place = len(commands)
        place = place or len(commands)
        commands[place:place] = [Command(name, value) for value in waiting]
        return Modelfile(tuple(commands))


def follows(name: str, other: str) -> bool:
    """Whether the first command called `name` goes behind one called `other` rather than to the end."""
    return name == DRAFT and other == MODEL
