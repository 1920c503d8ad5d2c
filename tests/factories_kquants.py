"""Drafters whose rows hold 256 values, the block of K-quants, and a target of the same width."""

from pathlib import Path

from factories import make_drafter, make_target

WIDTH = 256


def make_wide_target(path: Path) -> Path:
    return make_target(path, hidden=WIDTH)


def make_wide_drafter(folder: Path, version: int = 2, *, dtype: str = "BF16", **changes: object) -> Path:
    """A DFlash drafter in which every matrix has rows of 256 or 768 values."""
    draft = changes.pop("dflash_config", {})
    if version == 2:
        draft = {"selector_rank": WIDTH, **draft}
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 64, "num_attention_heads": 4}
    return make_drafter(folder, version, dtype=dtype, **{**sizes, **changes}, dflash_config=draft)
