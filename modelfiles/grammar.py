"""Ollama's Modelfile grammar: text in, commands out, as its own parser makes them; and back, so that they survive it.

The measure is what that parser answers (tests/data/modelfile_cases.json), quirks and error texts included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dflash2.errors import ModelfileError
from dflash2.modelfiles.go_printable import NOT_PRINTED, PRINTED

KEYWORDS = (
    "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter", "message",
    "requires",
)  # fmt: skip
ROLES = ("system", "user", "assistant")
# Ollama's name of a command whose keyword is FROM; all others but PARAMETER have the name of their keyword.
MODEL = "model"
_NO_COMMAND = 'command must be one of "' + '", "'.join(KEYWORDS[:-1]) + f'", or "{KEYWORDS[-1]}"'
_NO_ROLE = 'message role must be one of "system", "user", or "assistant"'
_TOO_SHORT = "unexpected EOF"
_NO_FROM = "no FROM line"

_BLANKS = " \t"
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*)*")
_KEYWORD = re.compile(r".[A-Za-z]*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_]*")
_ROLE = re.compile(r"[A-Za-z]*")
_NEWLINE = re.compile(r"[\r\n]")
_DROPPED = re.compile(f"[^{PRINTED}\t]")
_HALF = re.compile("[\ud800-\udfff]")
_UTF16_HALF = re.compile("[\udc00-\udfff]{2}|[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Command:
    """One command under the name that Ollama gives it, with its value unquoted.

    `name` is `model` for FROM, the parameter's own for PARAMETER (a parameter that has the name of a command is that
    command), else the keyword in lower case. `args` of a `message` is `ROLE: TEXT`.
    """

    name: str
    args: str


@dataclass(frozen=True)
class Located:
    """A command in its text: from its keyword at `start` to `end`, its line end or the end of the text."""

    command: Command
    start: int
    end: int


def decode(source: str | bytes) -> str:
    """The text that Ollama reads: UTF-8, or UTF-16 with a byte order mark; U+FFFD for what is none."""
    if isinstance(source, str):
        return _HALF.sub(_REPLACEMENT, source.removeprefix("\ufeff"))
    for mark, encoding in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if source.startswith(mark):
            body = source[2:]
            whole = body[: len(body) // 2 * 2].decode(encoding, "surrogatepass")
            return _UTF16_HALF.sub(_REPLACEMENT, whole) + _REPLACEMENT * (len(body) % 2)
    if source.startswith(b"\xef\xbb\xbf"):
        # Behind a mark, every bad byte counts by itself.
        return _HALF.sub(_REPLACEMENT, source[3:].decode("utf-8", "surrogateescape"))
    return source.decode("utf-8", "replace")


def scan(text: str) -> Iterator[Located]:
    """The commands of a Modelfile; raises ModelfileError with Ollama's words where it is none."""
    position = 0
    found_model = False
    while (start := _end_of(_BETWEEN, text, position)) < len(text):
        keyword, stop = _word(text, start, _KEYWORD)
        keyword = NOT_PRINTED.sub("", keyword).lower()
        if text[stop] not in _BLANKS or keyword not in KEYWORDS:
            raise _at_line(text, stop, _NO_COMMAND)
        name, role = MODEL if keyword == "from" else keyword, ""
        if keyword == "parameter":
            name, stop = _argument(text, stop + 1, _NAME)
        elif keyword == "message":
            role, stop = _argument(text, stop + 1, _ROLE)
            if role not in ROLES:
                raise _at_line(text, stop, _NO_ROLE)
            role += ": "
        value, position = read_value(text, stop + 1)
        found_model = found_model or name == MODEL
        yield Located(Command(name, role + value), start, position)
    if not found_model:
        raise ModelfileError(_NO_FROM)


def read_value(text: str, start: int) -> tuple[str, int]:
    """The value that begins at `start`, and where its line ends.

    A value ends with its line, but one that begins with `"` or `\"\"\"` not before a line that ends in the same. Raises
    ModelfileError if there is no such line.
    """
    lines: list[str] = []
    mark = ""
    while True:
        newline = _NEWLINE.search(text, start)
        end = newline.start() if newline else len(text)
        line = _DROPPED.sub("", text[start:end])
        if not lines:
            line = line.lstrip(_BLANKS)
            mark = next((mark for mark in ('"""', '"') if line.startswith(mark)), "")
        lines.append(line)
        closing = line.rstrip(_BLANKS)
        if closing.endswith(mark) and (len(lines) > 1 or len(closing) >= 2 * len(mark)):
            value = "".join(lines).rstrip(_BLANKS)
            return value[len(mark) : len(value) - len(mark)], end
        if newline is None:
            raise ModelfileError(_TOO_SHORT)
        lines.append(newline.group())
        start = newline.end()


def write_command(command: Command) -> str:
    """The lines of a command, without the last line end, as Ollama writes it wherever that reads back as the same.

    Raises ModelfileError for what no form of writing keeps.
    """
    name, value = command.name, command.args
    if name == "message":
        role, colon, text = value.partition(": ")
        if not colon or role not in ROLES:
            raise ModelfileError(f"A MESSAGE needs a role, {', '.join(ROLES)} in lower case; {role[:20]!r} is none.")
        return f"MESSAGE {role} {_write_value(text, 'MESSAGE')}"
    if name == MODEL:
        return f"FROM {_write_value(value, 'FROM')}"
    if name in KEYWORDS and name not in ("from", "parameter"):
        return f"{name.upper()} {_write_value(value, name.upper())}"
    if not _NAME.fullmatch(name):
        raise ModelfileError(f"{name!r} cannot be the name of a PARAMETER: only letters, digits and _ can.")
    return f"PARAMETER {name} {_write_value(value, f'PARAMETER {name}')}"


def _write_value(value: str, what: str) -> str:
    if dropped := _DROPPED.search(_NEWLINE.sub("", value)):
        code = f"U+{ord(dropped.group()):04X}"
        raise ModelfileError(f"{what} holds the character {code}, which Ollama would drop; remove it from the value.")
    quoted = ('"""', '"') if '"' in value else ('"', '"""')
    for mark in ("", *quoted):
        written = f"{mark}{value}{mark}"
        if _reads_as(written, value):
            return written
    raise ModelfileError(
        f"{what} holds lines that end in one and in three quotes, so that Ollama would end the value there; remove"
        " the quotes from the end of one."
    )


def _reads_as(written: str, value: str) -> bool:
    try:
        return read_value(f"{written}\n", 0) == (value, len(written))
    except ModelfileError:
        return False


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()


def _word(text: str, start: int, pattern: re.Pattern[str]) -> tuple[str, int]:
    """What `pattern` takes, and where it stops: before the end of the text."""
    stop = _end_of(pattern, text, start)
    if stop == len(text):
        raise ModelfileError(_TOO_SHORT)
    return text[start:stop], stop


def _argument(text: str, start: int, pattern: re.Pattern[str]) -> tuple[str, int]:
    """The same for a word that a blank must follow."""
    word, stop = _word(text, start, pattern)
    if text[stop] not in _BLANKS:
        raise ModelfileError(f"{_TOO_SHORT}: {word}")
    return word, stop


def _at_line(text: str, position: int, problem: str) -> ModelfileError:
    """Ollama counts the character at `position` too, and both of a CR LF."""
    return ModelfileError(f"(line {1 + len(_NEWLINE.findall(text, 0, position + 1))}): {problem}")
