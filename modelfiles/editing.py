"""Changing one kind of command in the text of a Modelfile: every other byte stays, comments and order with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.errors import ModelfileError
from dflash2.modelfiles.grammar import Command, Located, scan, write_command
from dflash2.modelfiles.modelfile import follows

_HALF = re.compile("[\ud800-\udfff]")
_UTF16 = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_NEWLINES = "\r\n"


@dataclass(frozen=True)
class _Edit:
    """`text` instead of what is between `start` and `end`."""

    start: int
    end: int
    text: str


def set_values(source: bytes, name: str, values: Sequence[str]) -> bytes:
    """The Modelfile `source` with exactly `values` for the commands called `name` (`model` for FROM).

    The result parses to `Modelfile.parse(source).with_values(name, values)`; what has its value already is not
    touched. Encoding, byte order mark and line ends are those of `source`. Raises ModelfileError if `source` is no
    Modelfile, or a value cannot be written.
    """
    mark, encoding, errors = _encoding_of(source)
    body = source[len(mark) :]
    if encoding != "utf-8" and len(body) % 2:
        raise ModelfileError("The Modelfile ends in half a character of UTF-16; save it again.")
    text = body.decode(encoding, errors)
    # Bytes that are no text are one character each here, as bad as the one that Ollama puts in their place.
    found = list(scan(_HALF.sub("\ufffd", text)))
    edited = _apply(text, _edits(text, found, name, values))
    return mark + edited.encode(encoding, errors)


def _encoding_of(source: bytes) -> tuple[bytes, str, str]:
    for mark, encoding in _UTF16:
        if source.startswith(mark):
            return mark, encoding, "surrogatepass"
    mark = b"\xef\xbb\xbf"
    return mark if source.startswith(mark) else b"", "utf-8", "surrogateescape"


def _edits(text: str, found: Sequence[Located], name: str, values: Sequence[str]) -> list[_Edit]:
    own = [one for one in found if one.command.name == name]
    edits = [
        _Edit(one.start, one.end, write_command(Command(name, value)))
        for one, value in zip(own, values, strict=False)
        if one.command.args != value
    ]
    edits += [_Edit(_line_start(text, one.start), _after_line(text, one.end), "") for one in own[len(values) :]]
    lines = [write_command(Command(name, value)) for value in values[len(own) :]]
    if lines:
        before = own or [one for one in found if follows(name, one.command.name)]
        edits.append(_insertion(text, _after_line(text, before[-1].end) if before else len(text), lines))
    return edits


def _insertion(text: str, place: int, lines: Sequence[str]) -> _Edit:
    """Whole lines at `place`, which is the start of a line or the end of a text whose last line has no end."""
    newline = _newline_of(text)
    begun = text[:place].endswith(tuple(_NEWLINES))
    return _Edit(place, place, ("" if begun else newline) + "".join(line + newline for line in lines))


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    pieces, done = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def _line_start(text: str, place: int) -> int:
    """Only blanks can stand before a command on its line."""
    while place and text[place - 1] in " \t":
        place -= 1
    return place


def _after_line(text: str, end: int) -> int:
    """Behind the line end at `end`, if there is one."""
    return end + 2 if text.startswith("\r\n", end) else min(end + 1, len(text))


def _newline_of(text: str) -> str:
    match = re.search("\r\n|[\r\n]", text)
    return match.group() if match else "\n"
