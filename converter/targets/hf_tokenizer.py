"""The tokenizer of a Hugging Face folder as GGUF keys: what llama.cpp's loader and upstream's converter agree on.

A drafter never splits text with it: the token texts, their number, the special ids and a form that loads are needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf.constants import TokenType

from dflash2.constants import DRAFTER_ARCHITECTURE, PRE_TOKENIZERS
from dflash2.converter.dialects.fields import Fields, load_json_object
from dflash2.converter.entry import BOOL, FLOATS, INTEGERS, STRING, STRINGS, U32, Entry
from dflash2.converter.targets.facts import TOKENS
from dflash2.converter.targets.post_processor import read_post_processor
from dflash2.converter.targets.sentencepiece_file import read_pieces
from dflash2.errors import CheckpointError, UnsupportedCheckpointError
from dflash2.text import HALF_CHARACTER, NOT_TEXT

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_PIECES_FILE = "tokenizer.model"
_ADDED_FILE = "added_tokens.json"
# Files of tokenizers that only code beside them can read.
_FOREIGN_FILES = ("*.tiktoken", "tiktoken.model", "tekken.json", "vocab.txt", "spiece.model")

# Architectures whose tokenizer.model goes before their tokenizer.json.
_PIECES_FIRST = frozenset({"llama", "nanbeige", "qwen2", "qwen3", "qwen3moe"})
_ADD_SPACE_PREFIX = frozenset({"llama", "nanbeige"})
_NAMED_BY_ARCHITECTURE = frozenset({"gemma4"})
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPECIAL_LOOK = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
_METASPACE = "\u2581"
_PADDING_SCORE, _ADDED_SCORE = -10000.0, -1000.0
# Well above every real one; a list of that many texts is built.
_MAX_VOCABULARY, _MAX_DIGITS = 1 << 22, 9
_SPECIAL_TYPES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Gemma 4: control tokens that chat parsers must see.
# fmt: off
_SHOWN = frozenset({
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
})
# fmt: on
# What splits text in tokenizers that several architectures share: a part of the pattern tells them apart.
_PATTERNS = (
    (r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|", "qwen35"),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|", "llama-bpe"),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|", "qwen2"),
    (r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|", "deepseek-v3"),
)
_GLM_SPECIALS = (("bos", "[gMASK]"), ("eot", "<|user|>"), ("unk", "<|endoftext|>"), ("eom", "<|observation|>"))
# Special tokens that no config names; those that one names stay.
_SPECIALS: dict[str, tuple[tuple[str, str], ...]] = {
    "glm-dsa": _GLM_SPECIALS,
    "glm4": (("eos", "<|endoftext|>"), ("eot", "<|user|>"), ("unk", "<|endoftext|>"), ("bos", "<|endoftext|>")),
    "glm4moe": _GLM_SPECIALS,
    "glm5-next": _GLM_SPECIALS,
    "muse-glimmer": (("eot", "<|eot|>"),),
}


@dataclass(frozen=True)
class _Added:
    """One added token of tokenizer.json."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class _TokenizerJson:
    """What is needed of tokenizer.json: base vocabulary by id, added tokens, kind of model."""

    path: Path
    kind: str
    base: dict[int, str]
    added: dict[int, _Added]
    byte_fallback: bool
    pattern: str


@dataclass
class _Vocabulary:
    """Token texts with GGUF types and, where the kind has them, scores; `merges` says whether merge rules belong."""

    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: bool = True


def read_tokenizer(folder: Path, architecture: str, config: Fields) -> tuple[Entry, ...]:
    """All `tokenizer.` keys for a target of GGUF `architecture`, padded to the `vocab_size` of its `config`.

    Raises CheckpointError if a file is missing or damaged, UnsupportedCheckpointError for a kind that is not converted.
    """
    vocab_size = config.optional_integer("vocab_size", maximum=_MAX_VOCABULARY)
    if architecture in _PIECES_FIRST and (folder / _PIECES_FILE).is_file():
        vocabulary = _from_pieces(folder, vocab_size)
    elif (folder / TOKENIZER_FILE).is_file():
        vocabulary = _from_json(_read_json(folder / TOKENIZER_FILE), architecture, vocab_size)
    else:
        found = next((path.name for pattern in _FOREIGN_FILES for path in sorted(folder.glob(pattern))), None)
        raise UnsupportedCheckpointError(
            f"{folder} has no {TOKENIZER_FILE}{f', only {found},' if found else ''} to take the tokenizer from; give a"
            " GGUF of the target."
        )
    _require_text(folder, vocabulary.tokens)
    entries = tuple(_entries(folder, architecture, vocabulary, config))
    for entry in entries:
        if isinstance(entry.value, str) and HALF_CHARACTER.search(entry.value):
            raise CheckpointError(f"{folder}: {entry.key.rpartition('.')[2]!r} {NOT_TEXT}")
    return entries


def base_vocabulary(path: Path) -> dict[int, str]:
    """Token texts by id of the tokenizer.json at `path`, without added tokens; raises CheckpointError."""
    found = _read_json(path)
    return {token_id: text for token_id, text in found.base.items() if token_id not in found.added}


def _entries(folder: Path, architecture: str, vocabulary: _Vocabulary, config: Fields) -> Iterator[Entry]:
    yield Entry("tokenizer.ggml.model", vocabulary.model, STRING)
    if vocabulary.pre:
        yield Entry("tokenizer.ggml.pre", vocabulary.pre, STRING)
    yield Entry(TOKENS, tuple(vocabulary.tokens), STRINGS)
    if vocabulary.scores is not None:
        yield Entry("tokenizer.ggml.scores", tuple(vocabulary.scores), FLOATS)
    yield Entry("tokenizer.ggml.token_type", tuple(vocabulary.types), INTEGERS)
    special = _special_vocabulary(folder, vocabulary, config)
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    for kind, text in _SPECIALS.get(architecture, ()):
        if text in ids:
            special.special_token_ids.setdefault(kind, ids[text])
    scratch = gguf.GGUFWriter(None, DRAFTER_ARCHITECTURE)
    special.add_to_gguf(scratch, quiet=True)
    if architecture in _NAMED_BY_ARCHITECTURE:
        scratch.add_add_space_prefix(False)
        scratch.kv_data[0].pop("tokenizer.ggml.add_bos_token", None)
        scratch.add_add_bos_token(True)
    prefix = _optional_json(folder / _CONFIG_FILE).get("add_prefix_space")
    if architecture in _ADD_SPACE_PREFIX and isinstance(prefix, bool):
        scratch.add_add_space_prefix(prefix)
    for key, stored in scratch.kv_data[0].items():
        if key.startswith("tokenizer."):
            yield _entry(key, stored.value)


def _entry(key: str, value: object) -> Entry:
    if isinstance(value, bool):
        return Entry(key, value, BOOL)
    if isinstance(value, int):
        return Entry(key, value, U32)
    if isinstance(value, (list, tuple)):
        return Entry(key, tuple(map(str, value)), STRINGS)
    return Entry(key, str(value), STRING)


def _special_vocabulary(folder: Path, vocabulary: _Vocabulary, config: Fields) -> gguf.SpecialVocab:
    """Special ids, merges and chat template, by the rules of the gguf package."""
    ids = {kind: config.get(f"{kind}_token_id") for kind in _SPECIAL_TYPES}
    kinds = [kind for kind, token_id in ids.items() if not (isinstance(token_id, int) and token_id < 0)]
    try:
        special = gguf.SpecialVocab(
            folder, load_merges=vocabulary.merges, special_token_types=tuple(kinds), n_vocab=len(vocabulary.tokens)
        )
        _post_process(folder, special, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file makes it raise
        raise CheckpointError(
            f"{folder}: {TOKENIZER_FILE} and {_CONFIG_FILE} cannot be read together; download them."
        ) from error
    if vocabulary.merges and not special.merges:
        raise CheckpointError(
            f"{folder / TOKENIZER_FILE} has no merge rules; download it again, or give a GGUF of the target."
        )
    return special


def _post_process(folder: Path, special: gguf.SpecialVocab, kinds: list[str]) -> None:
    tokenizer = _optional_json(folder / TOKENIZER_FILE)
    found = read_post_processor(tokenizer, _optional_json(folder / _CONFIG_FILE))
    special.add_special_token |= found.added
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    special.special_token_ids |= {k: ids[text] for k, text in found.named.items() if k in kinds and text in ids}


def _from_json(found: _TokenizerJson, architecture: str, vocab_size: int | None) -> _Vocabulary:
    if found.kind != "BPE":
        raise UnsupportedCheckpointError(
            f"{found.path} is a {found.kind} tokenizer, and only BPE ones are converted; give a GGUF of the target."
        )
    last = max((*found.base, *found.added))
    size = last + 1 if vocab_size is None else vocab_size
    if last >= size:
        raise CheckpointError(
            f"{found.path} has token {last}, but 'vocab_size' in config.json is {size}; download both."
        )
    if found.byte_fallback:
        return _pieces_of_json(found, architecture, size)
    pre = PRE_TOKENIZERS.get(architecture) or _pre_of_pattern(found)
    vocabulary = _Vocabulary("gpt2", pre, [], [])
    for token_id in range(size):
        text, kind = _token(found, token_id)
        vocabulary.tokens.append(text)
        vocabulary.types.append(kind)
    return vocabulary


def _token(found: _TokenizerJson, token_id: int) -> tuple[str, TokenType]:
    if added := found.added.get(token_id):
        if added.special or _SPECIAL_LOOK.fullmatch(added.text):
            return added.text, TokenType.CONTROL
        return added.text.replace(_METASPACE, " "), TokenType.USER_DEFINED
    text = found.base.get(token_id)
    return (_padding(token_id), TokenType.UNUSED) if text is None else (text, TokenType.NORMAL)


def _padding(token_id: int) -> str:
    return f"[PAD{token_id}]"


def _pre_of_pattern(found: _TokenizerJson) -> str:
    for part, pre in _PATTERNS:
        if part in found.pattern:
            return pre
    raise UnsupportedCheckpointError(
        f"{found.path} splits text by rules that are not known here; give a GGUF of the target."
    )


def _pieces_of_json(found: _TokenizerJson, architecture: str, size: int) -> _Vocabulary:
    """BPE on SentencePiece texts. Merge rules come along only where the loader reads them (Gemma 4)."""
    named = architecture in _NAMED_BY_ARCHITECTURE
    vocabulary = _Vocabulary(architecture if named else "llama", None if named else "default", [], [], [], merges=named)
    for token_id in range(size):
        text, kind = _piece(found, token_id, shown=named)
        vocabulary.tokens.append(text)
        vocabulary.types.append(kind)
    vocabulary.scores = [_ADDED_SCORE] * size
    return vocabulary


def _piece(found: _TokenizerJson, token_id: int, shown: bool) -> tuple[str, TokenType]:
    added, text = found.added.get(token_id), found.base.get(token_id)
    if added is None and text is None:
        return _padding(token_id), TokenType.UNUSED
    if added and shown and added.text in _SHOWN:
        return added.text, TokenType.USER_DEFINED
    if added and (added.special or text is None):
        return added.text, TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    text = text or ""
    return text, TokenType.BYTE if _BYTE_PIECE.fullmatch(text) else TokenType.NORMAL


def _from_pieces(folder: Path, vocab_size: int | None) -> _Vocabulary:
    """SentencePiece model, then added_tokens.json, then the added tokens of tokenizer_config.json."""
    pieces = read_pieces(folder / _PIECES_FILE)
    size = len(pieces) if vocab_size is None else vocab_size
    tokens = [_padding(token_id) for token_id in range(size)]
    types, scores = [int(TokenType.UNUSED)] * size, [_PADDING_SCORE] * size
    for token_id, piece in enumerate(pieces[:size]):
        defined = piece.type == TokenType.USER_DEFINED
        tokens[token_id], scores[token_id] = piece.text, piece.score
        types[token_id] = int(TokenType.NORMAL) if defined else piece.type
    for token_id, text, kind in _added_pieces(folder):
        if token_id < size:
            tokens[token_id], types[token_id], scores[token_id] = text, kind, _ADDED_SCORE
    return _Vocabulary("llama", "default", tokens, types, scores, merges=False)


def _added_pieces(folder: Path) -> Iterator[tuple[int, str, TokenType]]:
    for text, token_id in _optional_json(folder / _ADDED_FILE).items():
        if not _is_id(token_id):
            raise _damaged(folder / _ADDED_FILE)
        yield token_id, text, TokenType.USER_DEFINED
    path = folder / _CONFIG_FILE
    decoder = _optional_json(path).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise _damaged(path)
    for number, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not number.isdecimal() or len(number) > _MAX_DIGITS or not isinstance(content, str):
            raise _damaged(path)
        if token.get("special") or _SPECIAL_LOOK.fullmatch(content):
            yield int(number), content, TokenType.CONTROL
        else:
            yield int(number), content.replace(_METASPACE, " "), TokenType.USER_DEFINED


def _read_json(path: Path) -> _TokenizerJson:
    content = load_json_object(path)
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list) or not all(map(_is_added, added)):
        raise _damaged(path)
    vocab = model.get("vocab")
    # Old files of the BPE kind leave the type out.
    kind = model.get("type") or ("BPE" if "merges" in model else "unnamed")
    base: dict[int, str] = {}
    if isinstance(vocab, dict):
        if not all(map(_is_id, vocab.values())):
            raise _damaged(path)
        base = {token_id: text for text, token_id in vocab.items()}
    elif kind == "BPE":
        raise _damaged(path)
    if kind == "BPE" and not base and not added:
        raise _damaged(path)
    return _TokenizerJson(
        path=path,
        kind=str(kind),
        base=base,
        added={token["id"]: _Added(token["id"], token["content"], bool(token.get("special"))) for token in added},
        byte_fallback=bool(model.get("byte_fallback")),
        pattern=" ".join(_patterns(content.get("pre_tokenizer"))),
    )


def _patterns(rules: Any) -> Iterator[str]:
    """The regular expressions of a pre-tokenizer, which may be nested."""
    if isinstance(rules, dict):
        pattern = rules.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]
        for inner in rules.get("pretokenizers") or ():
            yield from _patterns(inner)


def _is_added(token: object) -> bool:
    return isinstance(token, dict) and _is_id(token.get("id")) and isinstance(token.get("content"), str)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_VOCABULARY


def _optional_json(path: Path) -> dict[str, Any]:
    return dict(load_json_object(path)) if path.is_file() else {}


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is not a tokenizer file of the known form; download it again.")


def _require_text(folder: Path, tokens: list[str]) -> None:
    """JSON can spell half a character, which has no bytes."""
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{folder} has a token that is not text (a lone surrogate); download it again."
        ) from error
