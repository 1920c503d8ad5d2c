"""Tiny real tokenizers in Hugging Face folders, trained here, and folders made from the vocabulary of a GGUF file."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from factories import HIDDEN, TARGET_LAYERS, VOCAB

from dflash2.gguf_info import GGUFInfo

TEXT = ["the quick brown fox jumps over the lazy dog", "llama drafts a block of eight tokens", "ünïcödé ↦ text"]
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}| ?", r"|\p{N}{1,3}| ?")
DEEPSEEK3_PATTERN = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_target_config(folder: Path, architecture: str = "Qwen3ForCausalLM", **changes: object) -> Path:
    """config.json of a target that fits `make_drafter`, with the special ids of the tokenizers below."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "num_hidden_layers": TARGET_LAYERS,
        "vocab_size": VOCAB,
        "eos_token_id": 0,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer_config(folder: Path, **changes: object) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    } | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def train_byte_level(
    folder: Path,
    *,
    size: int = VOCAB - 8,
    pattern: str = QWEN2_PATTERN,
    special: Iterable[str] = ("<|endoftext|>", "<|mask|>"),
    added: Iterable[str] = ("<think>",),
) -> Path:
    """A byte-level BPE tokenizer (GPT-2 kind) of at most `size` base tokens, special ones first; `added` come last."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return _save(tokenizer, folder)


def train_byte_fallback(folder: Path, *, special: Iterable[str] = ("<pad>", "<eos>", "<bos>", "<unk>")) -> Path:
    """BPE on SentencePiece texts with 256 byte tokens, as Gemma 4 and Llama 2 have in tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4, special_tokens=[*special, *byte_pieces], show_progress=False, max_token_length=4
    )
    learned.train_from_iterator(["ab abc abcd"], trainer)
    content = json.loads(learned.to_str())
    model = content["model"]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], [tuple(m) for m in model["merges"]], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = learned.normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(["\u2581\u2581 tool"])
    return _save(tokenizer, folder)


def _save(tokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sentencepiece_model(pieces: Iterable[tuple[str, float, int]]) -> bytes:
    """A tokenizer.model: (text, score, type) of every piece, and a trainer part (BPE, byte fallback)."""
    encoded = []
    for text, score, kind in pieces:
        data = text.encode()
        piece = b"\x0a" + _varint(len(data)) + data + b"\x15" + struct.pack("<f", score) + b"\x18" + _varint(kind)
        encoded.append(b"\x0a" + _varint(len(piece)) + piece)
    return b"".join(encoded) + b"\x12\x05\x18\x02\x98\x02\x01"


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def folder_of(info: GGUFInfo, folder: Path, architecture: str, pattern: str, **config: object) -> Path:
    """The Hugging Face folder that the vocabulary of a GGUF file could have come from."""
    tokens, types = info.metadata["tokenizer.ggml.tokens"], info.metadata["tokenizer.ggml.token_type"]
    merges = info.metadata["tokenizer.ggml.merges"]
    padding = {i for i, text in enumerate(tokens) if text == f"[PAD{i}]"}
    added = [
        {"id": i, "content": text, "special": kind == CONTROL, "normalized": False}
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) and i not in padding
    ]
    outside = padding | {token["id"] for token in added}
    byte_fallback = architecture.startswith("Gemma4")
    content = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}},
        "model": {
            "type": "BPE",
            "byte_fallback": byte_fallback,
            "vocab": {text: i for i, text in enumerate(tokens) if i not in outside},
            "merges": [merge.split(" ", 1) if byte_fallback else merge for merge in merges],
        },
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ids = {
        f"{kind}_token_id": info.metadata[key]
        for kind, name in SPECIAL_KEYS.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in info.metadata
    }
    return write_target_config(folder, architecture, vocab_size=len(tokens), **{"eos_token_id": None} | ids | config)


SPECIAL_KEYS: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
