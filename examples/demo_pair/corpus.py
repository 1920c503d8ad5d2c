"""Text, tokenizer and prompts of the demo pair: the standard library of the running Python."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK)
END_OF_TEXT_ID = 0
MASK_ID = 1
# One file in HELD_OUT_EVERY is never trained on; prompts are cut from those alone.
HELD_OUT_EVERY = 20
# Tables rather than text; they would teach the target to loop.
SKIPPED_FOLDERS = ("site-packages", "encodings", "__pycache__", "lib2to3/tests/data", "test/data")
MAX_FILE_BYTES = 400_000


@dataclass(frozen=True)
class SourceFile:
    """One text of the corpus: its path inside the standard library and its content."""

    name: str
    text: str
    held_out: bool


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """Return every usable `.py` file below `root` (default: the running standard library), by name."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(folder in name for folder in SKIPPED_FOLDERS) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and text.isascii():
            files.append(SourceFile(name, text, _is_held_out(name)))
    return files


def train_tokenizer(files: list[SourceFile], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's splitting (llama.cpp's `gpt-2` pre-tokenizer) on the training files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f.text for f in files if not f.held_out), trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, files: list[SourceFile]) -> np.ndarray:
    """Return the token ids of `files`, each preceded by the end-of-text token: int32 `[N]`."""
    encoded = tokenizer.encode_batch([f.text for f in files])
    parts = []
    for encoding in encoded:
        parts.append(np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.int32))
    return np.concatenate(parts)


def cut_prompts(
    tokenizer: Tokenizer, files: list[SourceFile], token_range: tuple[int, int], seed: int
) -> Iterator[dict[str, str]]:
    """Cut prompts of `token_range` tokens from held-out files without end, each starting at a line start.

    A prompt is used only if its text tokenizes back to the same tokens, so that text and ids agree everywhere.
    """
    rng = np.random.default_rng(seed)
    held_out = [f for f in files if f.held_out and len(f.text) > 2000]
    while True:
        source = held_out[rng.integers(len(held_out))]
        line_starts = [i + 1 for i, char in enumerate(source.text[:-1000]) if char == "\n"]
        start = line_starts[rng.integers(len(line_starts))]
        length = int(rng.integers(token_range[0], token_range[1] + 1))
        ids = tokenizer.encode(source.text[start : start + 16 * length]).ids[:length]
        text = tokenizer.decode(ids)
        if len(ids) == length and text.strip() and tokenizer.encode(text).ids == ids:
            yield {"file": source.name, "prompt": text}


def distinct_4grams(tokens: list[int]) -> float:
    """Return the share of distinct 4-grams; a continuation below 0.6 counts as looping."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams)


def end_of_text_before_loop(tokens: list[int], begin: int, gram: int = 16, kept: int = 32) -> int:
    """Return where text that starts at `begin` is cut: `kept` tokens into its first repeat of a `gram`-gram."""
    seen = set()
    for place in range(begin, len(tokens) - gram + 1):
        piece = tuple(tokens[place : place + gram])
        if piece in seen:
            return min(place + kept, len(tokens))
        seen.add(piece)
    return len(tokens)
