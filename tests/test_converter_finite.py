"""Values that are no numbers are found in every type of tensor, copied ones too."""

import numpy as np
import pytest
from factories import make_drafter, make_target
from factories_carry import tensor_bytes
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dflash2.converter import DraftVocabulary, convert
from dflash2.converter.finite import all_finite
from dflash2.errors import CheckpointError
from dflash2.gguf_info import read_gguf_info


def readable(ggml_type: GGMLQuantizationType) -> bool:
    block = np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8)
    try:
        dequantize(block, ggml_type)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("ggml_type", [t for t in GGMLQuantizationType if readable(t)], ids=lambda t: t.name)
def test_what_is_found_is_what_dequantising_shows(ggml_type):
    rng = np.random.default_rng(0)
    n_bytes, found = GGML_QUANT_SIZES[ggml_type][1], set()
    for _ in range(400):
        block = rng.integers(0, 256, (1, n_bytes), np.uint8)
        at = int(rng.integers(0, n_bytes))
        block[0, at : at + 2] = rng.choice([0x00, 0x7C, 0x7E, 0xFC, 0x7F, 0xFF, 0x80], len(block[0, at : at + 2]))
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(dequantize(block, ggml_type)).all())
        assert all_finite(block.reshape(-1), ggml_type) is finite, block.tobytes().hex()
        found.add(finite)
    assert True in found


def test_a_type_that_cannot_be_read_passes():
    assert not readable(GGMLQuantizationType.Q8_K)
    assert all_finite(np.full(GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K][1], 255, np.uint8), GGMLQuantizationType.Q8_K)


@pytest.mark.parametrize("half", [b"\x00\x7e", b"\x00\x7c", b"\x00\xfc"], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_copied_row_whose_scale_is_no_number_is_refused(tmp_path, half, trimmed):
    target = make_target(tmp_path / "target.gguf")
    info = read_gguf_info(target)
    assert info.tensor("token_embd.weight").type_name == "Q8_0"
    data = bytearray(target.read_bytes())
    begin = info.tensor("token_embd.weight").offset
    data[begin : begin + 2] = half
    target.write_bytes(data)
    (tmp_path / "counts.txt").write_text("5 1\n")
    options = (
        {"draft_vocab": DraftVocabulary(8, (tmp_path / "counts.txt",))} if trimmed else {"embed_target_head": True}
    )
    with pytest.raises(
        CheckpointError, match=r"target\.gguf: tensor 'token_embd\.weight' has values that are infinite"
    ):
        convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", **options)
    assert not (tmp_path / "out.gguf").exists()
    assert tensor_bytes(read_gguf_info(target), "token_embd.weight")[:2].tobytes() == half
