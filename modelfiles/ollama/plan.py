"""What a model on an Ollama server is to be made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash2.errors import ModelfileError, OllamaError
from dflash2.gguf_info import read_gguf_info
from dflash2.modelfiles.grammar import MODEL, Command
from dflash2.modelfiles.modelfile import Modelfile
from dflash2.modelfiles.pairs import Pair
from dflash2.regular_file import exists, open_file, system_errors

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class Plan:
    """One model with its draft.

    Either `files`, the GGUF files of the target (all parts of a split one, a projector), or `base`, the name of a
    target that the server has or can pull. `parameters` have typed values; `settings` go into the request as they
    are: `template`, `system`, `license` and so on.
    """

    drafter: Path
    files: tuple[Path, ...] = ()
    base: str | None = None
    adapters: tuple[Path, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files that the server must have, the drafter, which is the smallest, first."""
        return (self.drafter, *self.files, *self.adapters)


def plan_of_pair(pair: Pair) -> Plan:
    """The plan for a pair of GGUF files; raises OllamaError if a part of a split target is missing."""
    return Plan(pair.drafter.path, parts_of(pair.target.path))


def plan_of_modelfile(path: Path) -> Plan:
    """The plan that a Modelfile states; its relative paths start from its folder.

    Raises ModelfileError for what Ollama would not read, OllamaError if it names no draft, several targets, or files
    that cannot be read.
    """
    with system_errors(OllamaError), open_file(path) as file:
        source = file.read()
    try:
        modelfile = Modelfile.parse(source)
        modelfile.check_values()
    except ModelfileError as error:
        raise ModelfileError(f"{path} is refused as Ollama would refuse it: {str(error).rstrip('.')}.") from error
    files: list[Path] = []
    bases: list[str] = []
    for text in modelfile.values(MODEL):
        place = _place(text, path)
        if exists(place):
            files += parts_of(place)
        else:
            bases.append(text)
    if bases and (files or len(bases) > 1):
        # The server would take one name and drop the rest.
        raise OllamaError(f"{path}: FROM names {', '.join(bases)}, no file here, beside another; name one target.")
    drafts = modelfile.values("draft")
    if len(drafts) != 1:
        raise OllamaError(f"{path} has {len(drafts)} DRAFT lines; one is needed, with the drafter's GGUF file.")
    return Plan(
        _place(drafts[0], path),
        tuple(files),
        bases[0] if bases else None,
        tuple(_place(text, path) for text in modelfile.values("adapter")),
        modelfile.parameters,
        _settings(modelfile),
    )


def with_settings(plan: Plan, settings: Mapping[str, Sequence[str]]) -> Plan:
    """`plan` with values of commands by name, as `Modelfile.values` has them, in the place of its own.

    Raises ModelfileError, in Ollama's words, for what it would refuse.
    """
    chosen = Modelfile(tuple(Command(name, value) for name, values in settings.items() for value in values))
    chosen.check_values()
    return replace(
        plan,
        parameters={**plan.parameters, **chosen.parameters},
        settings={**plan.settings, **_settings(chosen)},
    )


def _settings(modelfile: Modelfile) -> dict[str, object]:
    """Fields of the request for what is neither a file nor a parameter; of several the last one counts."""
    values = {name: modelfile.value(name) for name in ("template", "system", "renderer", "parser", "requires")}
    settings: dict[str, object] = {name: value for name, value in values.items() if value is not None}
    if values["requires"]:
        settings["requires"] = values["requires"].removeprefix("v")
    if licenses := modelfile.values("license"):
        settings["license"] = licenses
    if messages := modelfile.messages:
        settings["messages"] = [{"role": role, "content": content} for role, content in messages]
    return settings


def _place(text: str, modelfile: Path) -> Path:
    """Where a path of a Modelfile leads: `~` and `~user` are homes."""
    try:
        return modelfile.parent / Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise OllamaError(f"{modelfile}: {text} names no home folder that there is; give the whole path.") from error


def parts_of(path: Path) -> tuple[Path, ...]:
    """The GGUF file `path`, or all parts of the split one that it begins; raises OllamaError if one is missing."""
    count = read_gguf_info(path).integer("split.count") or 1
    if count == 1:
        return (path,)
    named = _PART.fullmatch(path.name)
    if named is None or int(named["number"]) != 1 or int(named["count"]) != count:
        raise OllamaError(
            f"{path} is one of the {count} files of a split GGUF; give the first, named ...-00001-of-{count:05d}.gguf."
        )
    parts = tuple(path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    for part in parts:
        if not part.is_file():
            raise OllamaError(f"{part} is missing, a part of {path.name}; put it beside the others.")
    return parts
