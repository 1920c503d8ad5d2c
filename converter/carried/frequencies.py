"""How often each token occurs: from lists of counts, or from text in the target's own tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash2.errors import DraftVocabularyError
from dflash2.native import Tokenizer

Counts = npt.NDArray[np.int64]

_PAIR = re.compile(r"(\d+)[ \t]+(\d+)")
_JSON_SUFFIX = ".json"
# Some tokenizers split text by regular expressions that recurse once per character: llama.cpp gets short pieces.
_PIECE_CHARACTERS = 4096
_MAX_COUNT = 2**62  # of all files together


def count_tokens(files: Sequence[Path], target: Path, vocab_size: int) -> Counts:
    """Occurrences of every token [vocabulary], summed over `files`.

    A file whose first line is `TOKEN_ID COUNT` (space or tab) is a list of such lines; one named `.json` is an object
    {"TOKEN_ID": COUNT}; any other is UTF-8 text, tokenised by llama.cpp with the vocabulary of the GGUF `target`, a
    few thousand characters at a time.

    Raises DraftVocabularyError for a file that is none of these or names a token beyond the vocabulary, NativeError if
    llama.cpp cannot load the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    total = 0
    tokenizer: Tokenizer | None = None
    try:
        for path in files:
            if path.exists() and not path.is_file():
                raise DraftVocabularyError(f"{path} is no file, but a folder, pipe or device; give a file.")
            pairs = _listed(path)
            if pairs is None:
                tokenizer = tokenizer or Tokenizer(target)
                pairs = _tokenised(path, tokenizer)
            for token, count, where in pairs:
                if token >= vocab_size:
                    raise DraftVocabularyError(
                        f"{where} names token {token}, the target's vocabulary has {vocab_size}; make the list with the"
                        " tokenizer of this target."
                    )
                total += count
                if total > _MAX_COUNT:
                    raise DraftVocabularyError(f"{where} makes the counts too large to add up; scale them down.")
                counts[token] += count
    finally:
        if tokenizer is not None:
            tokenizer.close()
    return counts


_Pairs = Iterator[tuple[int, int, str]]


def _listed(path: Path) -> _Pairs | None:
    """(token id, count, where it stands) of a list of counts; None if the file is text."""
    if path.suffix.lower() == _JSON_SUFFIX:
        return _from_json(path)
    for line in _lines(path):
        if line.strip():
            return _from_lines(path) if _PAIR.fullmatch(line.strip()) else None
    return None


def _from_lines(path: Path) -> _Pairs:
    for number, line in enumerate(_lines(path), 1):
        match = _PAIR.fullmatch(line.strip())
        if match:
            yield _number(match[1], path), _number(match[2], path), f"{path}, line {number},"
        elif line.strip():
            raise DraftVocabularyError(f"{path}, line {number}: expected a token id and a count, got {line[:40]!r}.")


def _number(digits: str, path: Path) -> int:
    if len(digits) > 18:
        raise DraftVocabularyError(f"{path} holds the number {digits[:24]}..., which is no token id and no count.")
    return int(digits)


def _from_json(path: Path) -> _Pairs:
    try:
        pairs = json.loads("".join(_lines(path)))
    except (ValueError, RecursionError) as error:
        raise DraftVocabularyError(f"{path} is not valid JSON ({error}); name a text file .txt.") from error
    if not isinstance(pairs, dict) or not all(
        re.fullmatch(r"\d{1,18}", key) and type(count) is int and 0 <= count < 10**18 for key, count in pairs.items()
    ):
        raise DraftVocabularyError(
            f'{path} is not an object of token ids and counts, {{"220": 17, ...}}; name a text file .txt.'
        )
    for key, count in pairs.items():
        yield int(key), count, f"{path}, key {key!r},"


def _tokenised(path: Path, tokenizer: Tokenizer) -> _Pairs:
    for piece in _pieces(path):
        tokens, counts = np.unique(tokenizer.tokenize(piece), return_counts=True)
        for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
            yield token, count, f"{path}"


def _pieces(path: Path) -> Iterator[str]:
    """The text in whole lines of a few thousand characters together; longer lines are cut."""
    piece = ""
    for line in _lines(path):
        if piece and len(piece) + len(line) > _PIECE_CHARACTERS:
            yield piece
            piece = ""
        piece += line
        while len(piece) > _PIECE_CHARACTERS:
            yield piece[:_PIECE_CHARACTERS]
            piece = piece[_PIECE_CHARACTERS:]
    if piece:
        yield piece


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends as they are, the longest in parts; raises DraftVocabularyError unless it is UTF-8 text."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while line := file.readline(1 << 20):
                yield line
    except OSError as error:
        raise DraftVocabularyError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DraftVocabularyError(f"{path} is not UTF-8 text; convert it to UTF-8 first.") from error
