"""The Modelfile of a pair, and the `ollama create` line that goes with it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from dflash2.errors import ModelfileError, OptionError
from dflash2.modelfiles.editing import set_values
from dflash2.modelfiles.grammar import MODEL, Command
from dflash2.modelfiles.modelfile import DRAFT, Modelfile
from dflash2.regular_file import exists

Route = Literal["gguf", "mlx"]

DRAFT_QUANTIZATIONS: dict[Route, tuple[str, ...]] = {
    "gguf": ("F32", "F16", "BF16", "Q8_0", "Q4_K_S", "Q4_K_M"),
    "mlx": ("int4", "int8", "nvfp4", "mxfp4", "mxfp8"),
}
# What a drafter must be stored as for `ollama create --draft-quantize`: F32 counts as unknown there.
QUANTIZABLE = frozenset({"F16", "BF16"})
OLD_LLAMA_CPP = (
    "released Ollama brings a llama.cpp from before DFlash 2, which fails with a wrong number of tensors;"
    " `dflash2 ollama runner install` lets it run ours for such models"
)
_PLAIN = re.compile(r"[\w@+=:,./\\-]+", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
_MAX_NAME = 80


def check_settings(settings: Mapping[str, Sequence[str]]) -> None:
    """Raise ModelfileError for values that `compose` could not write or that Ollama would refuse."""
    commands = [Command(name, value) for name, values in settings.items() for value in values]
    made = Modelfile((Command(MODEL, "any"), *commands))
    made.render()
    _check_values(made)


def _check_values(made: Modelfile) -> None:
    try:
        made.check_values()
    except ModelfileError as error:
        raise ModelfileError(f"Ollama would refuse the Modelfile: {error}; correct what sets it.") from error


def compose(target: Path, drafter: Path, settings: Mapping[str, Sequence[str]], base: bytes | None = None) -> bytes:
    """The text of a Modelfile for two files or folders.

    Args:
        target, drafter: absolute paths, which must be there.
        settings: values of other commands by name, as `Modelfile.values` has them.
        base: an existing Modelfile to change; all that is not set stays as it is, and so do FROM lines after the first.

    Raises ModelfileError for what Ollama would refuse or misread.
    """
    if target.resolve() == drafter.resolve():
        raise ModelfileError(
            f"{target} cannot be both FROM and DRAFT, Ollama refuses that; give the drafter's own path."
        )
    for path in (target, drafter):
        if not path.exists():
            raise ModelfileError(f"{path} is not there, and Ollama would take it for the name of a model.")
    wanted = {MODEL: (str(target),), DRAFT: (str(drafter),), **settings}
    if base is None:
        commands = tuple(Command(name, value) for name, values in wanted.items() for value in values)
        text = Modelfile(commands).render().encode()
    else:
        text = base
        wanted[MODEL] = (str(target), *Modelfile.parse(base).values(MODEL)[1:])
        for name, values in wanted.items():
            text = set_values(text, name, values)
    _check_values(Modelfile.parse(text))
    return text


def left_behind(made: Modelfile, folder: Path) -> tuple[str, ...]:
    """Relative paths in a Modelfile of `folder` that lead elsewhere once it is in another one, as they are written."""
    values = (*made.values(MODEL)[1:], *made.values("adapter"))
    return tuple(one for one in values if one and not Path(one).is_absolute() and exists(folder / one))


def create_arguments(name: str, modelfile: str, route: Route, draft_quantize: str | None = None) -> list[str]:
    """The arguments of `ollama create` for a Modelfile that `compose` made."""
    arguments = ["ollama", "create", name, "-f", modelfile]
    if route == "mlx":
        arguments.append("--experimental")
    if draft_quantize is not None:
        arguments += ["--draft-quantize", draft_quantize]
    return arguments


def shell_lines(arguments: Sequence[str], *, windows: bool) -> tuple[str, ...]:
    """The arguments as one line for the shell: of sh, or on Windows of cmd and of PowerShell where the two differ."""
    if not windows:
        return (shlex.join(arguments),)
    powershell = " ".join(one if _PLAIN.fullmatch(one) else "'" + one.replace("'", "''") + "'" for one in arguments)
    return tuple(dict.fromkeys((subprocess.list2cmdline(arguments), powershell)))


def check_draft_quantization(route: Route, wanted: str, stored: str | None) -> str:
    """`wanted` as Ollama spells it; `stored` is the type of the drafter's GGUF file.

    Raises OptionError for a type that the route does not have, or a drafter that cannot be quantised.
    """
    spelled = next((one for one in DRAFT_QUANTIZATIONS[route] if one.lower() == wanted.lower()), None)
    if spelled is None:
        known = ", ".join(DRAFT_QUANTIZATIONS[route])
        raise OptionError(f"--draft-quantize {wanted} is not possible on the {route} route; give one of {known}.")
    if route == "gguf" and stored not in QUANTIZABLE:
        raise OptionError(
            f"--draft-quantize needs a drafter in F16 or BF16, and this one is {stored or 'of unknown type'}; convert"
            " it with --outtype bf16, or leave the option out."
        )
    return spelled


def model_name(label: str) -> str:
    """A name for the model in Ollama, made of the target's: `org/Name-GGUF` becomes `name-dflash2`."""
    stem = label.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf").removesuffix("-gguf")
    return f"{_NOT_IN_NAMES.sub('-', stem).strip('-._')[: _MAX_NAME - 8] or 'model'}-dflash2"


def route_notes(route: Route, made: Modelfile) -> tuple[str, ...]:
    """What a user should know of a model that is created this way."""
    if route == "gguf":
        return (
            "two models with the same FROM and different drafters share one runner until it is unloaded;"
            " `ollama stop` the first before trying the second",
            "Ollama does not check that a drafter fits, neither when creating nor when running: use this pair as it is",
        )
    ignored = [keyword.upper() for keyword in ("message", "adapter") if made.values(keyword)]
    return (
        *((f"the mlx route ignores {' and '.join(ignored)}",) if ignored else ()),
        "the mlx route needs macOS on Apple silicon or CUDA 13, and an Ollama server on this machine",
        "drafting depth adapts up to the drafter's block there; draft_num_predict has no effect",
        "of drafters, released Ollama's MLX engine knows DFlash ones; DFlash 2 came with its pull request 17865",
    )
