"""A pair with a vocabulary of 64 single characters, whose next-token probabilities can be written down."""

from pathlib import Path

from factories import make_drafter, make_target

from dflash2.converter import convert

VOCAB = 64
END = 0
CHARACTERS = "".join(chr(code) for code in range(33, 33 + VOCAB - 2))  # token 2 and on


def make_small_pair(folder: Path) -> tuple[Path, Path]:
    """(target, drafter), both GGUF; the drafter has a selector of 7 candidates and a block of 4."""
    target = make_target(folder / "target.gguf", vocab=VOCAB, seed=3)
    checkpoint = make_drafter(
        folder / "drafter", seed=4, vocab_size=VOCAB, dflash_config={"selector_top_k": 7, "selector_rank": 16}
    )
    drafter = folder / "drafter.gguf"
    convert(checkpoint, target, drafter, outtype="f32")
    return target, drafter
