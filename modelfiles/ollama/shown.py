"""What an Ollama server says a model is made of: blobs by their digests, inside the Modelfile that it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash2.errors import ModelfileError, OllamaError
from dflash2.modelfiles.grammar import MODEL
from dflash2.modelfiles.modelfile import Modelfile
from dflash2.modelfiles.ollama.server import Server
from dflash2.modelfiles.parameters import DRAFT_NUM_PREDICT

# What the server takes where a model does not say.
_DEFAULT_DRAFT_TOKENS = 4
_BLOB = re.compile(r"sha256[-:]([0-9a-f]{64})\"*$")
_WORD = r"[A-Za-z0-9_]"
_NAME = re.compile(
    rf"(?:(?:(?:[a-z]+://)?{_WORD}[\w.:-]{{0,349}}/)?{_WORD}[\w-]{{0,79}}/)?{_WORD}[\w.-]{{0,79}}(?::{_WORD}[\w.-]{{0,79}})?",
    re.ASCII,
)
_LINE = re.compile(r"^(FROM|DRAFT|PARAMETER draft_num_predict) (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """One model: digests (`sha256:...`) of its target's blob and of its draft's.

    None where it has no draft, or where its target is no single blob (models of the MLX engine).
    `draft_num_predict` is the number of draft tokens, 0 or less for none; sizes are None where the server names none.
    """

    name: str
    base: str | None
    draft: str | None
    draft_num_predict: int
    embedding_length: int | None
    block_count: int | None


def show(server: Server, name: str) -> Shown:
    """Ask `server` about its model `name`; raises OllamaError if it has none of that name."""
    answer = server.show(name)
    commands = _commands(answer.modelfile or "")
    info = answer.modelinfo or {}
    architecture = info.get("general.architecture")
    return Shown(
        name,
        # A second FROM is a projector; of several drafts the last one counts.
        base=next((digest for command, text in commands if command == MODEL and (digest := _digest(text))), None),
        draft=next((_digest(text) for command, text in reversed(commands) if command == "draft"), None),
        draft_num_predict=_draft_num_predict(commands),
        embedding_length=_integer(info.get(f"{architecture}.embedding_length")),
        block_count=_integer(info.get(f"{architecture}.block_count")),
    )


def full_name(name: str) -> str:
    """A model's name with its tag, which is `latest` where none is given."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def check_name(name: str) -> None:
    """Raises OllamaError if `name` is none that a model can have: `[[host/]namespace/]model[:tag]`."""
    if not _NAME.fullmatch(name):
        raise OllamaError(
            f"{name} is no name that Ollama takes; give model, model:tag or namespace/model:tag, each of at most 80"
            " ASCII letters, digits, `_`, `-` and `.` (none in the namespace), a letter, digit or `_` first."
        )


def _commands(modelfile: str) -> list[tuple[str, str]]:
    """(command, argument) pairs; of a text that does not parse (a licence may hold quotes) those of single lines."""
    try:
        return [(command.name, command.args) for command in Modelfile.parse(modelfile).commands]
    except ModelfileError:
        names = {"FROM": MODEL, "DRAFT": "draft", f"PARAMETER {DRAFT_NUM_PREDICT}": DRAFT_NUM_PREDICT}
        return [(names[command], text) for command, text in _LINE.findall(modelfile)]


def _digest(text: str) -> str | None:
    match = _BLOB.search(text.strip())
    return f"sha256:{match[1]}" if match else None


def _draft_num_predict(commands: list[tuple[str, str]]) -> int:
    texts = [text for command, text in commands if command == DRAFT_NUM_PREDICT]
    return int(texts[-1]) if texts and re.fullmatch(r"-?[0-9]{1,9}", texts[-1]) else _DEFAULT_DRAFT_TOKENS


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
