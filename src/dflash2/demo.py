"""The demo pair that ships with the package: a small trained target, its DFlash 2 drafter and its v1 drafter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class DemoPair:
    """Paths of the demo pair.

    `target` is a Q8_0 GGUF (qwen3), `drafter` and `drafter_v1` are Hugging Face folders, `prompts` are texts cut
    from files that none of the three was trained on.
    """

    target: Path
    drafter: Path
    drafter_v1: Path
    prompts: tuple[str, ...]


def demo_pair() -> DemoPair:
    """Return the demo pair; it was made by `examples/demo_pair/train.py`."""
    folder = Path(str(files("dflash2"))) / "demo_pair"
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    return DemoPair(
        target=folder / "target-q8_0.gguf",
        drafter=folder / "drafter",
        drafter_v1=folder / "drafter-v1",
        prompts=tuple(prompt["prompt"] for prompt in prompts),
    )
