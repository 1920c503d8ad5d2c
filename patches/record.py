"""Write `bases.json` anew, after the series touches other files or a base is added."""

from __future__ import annotations

import json
from pathlib import Path

from dflash2.hashing import sha256_file
from dflash2.patches.bases import BASES, identity_files
from dflash2.patches.series import read_series
from dflash2.patches.source import source


def record() -> str:
    """The text of `bases.json` for the series as it is, from the sources of all bases."""
    files = identity_files(read_series())
    table = {name: {path: sha256_file(source(base) / path) for path in files} for name, base in BASES.items()}
    return json.dumps(table, indent=1) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "bases.json").write_text(record())
