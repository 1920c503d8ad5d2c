"""`inspect` says what a GGUF file is; what it cannot find it calls missing instead of guessing."""

from pathlib import Path

import pytest
from factories import make_drafter, make_target
from gguf import GGUFWriter

from dflash2.converter import Attention, Convolution, RopeFacts, Selector, TypeUse, convert, inspect
from dflash2.errors import GGUFError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target.gguf")


def test_dflash2_drafter(tmp_path, target):
    done = convert(make_drafter(tmp_path / "Tiny-DFlash2"), target, tmp_path / "out.gguf", outtype="q8_0")
    seen = inspect(done.output)
    facts = seen.drafter
    assert facts.version == 2
    assert (facts.block_size, facts.mask_token_id) == (4, 1)
    assert (facts.taps, facts.hf_taps) == ((1, 3, 4), (0, 2, 3))
    assert facts.attention == Attention((True, True), 32, causal_full=False, causal_sliding=False)
    assert (facts.convolution, facts.selector) == (Convolution(2, 16), Selector(32, 4))
    assert facts.rope == RopeFacts(10000.0, None, None, ())
    assert not facts.own_embeddings
    assert (seen.architecture, seen.name, seen.file_type) == ("dflash", "Tiny DFlash2", "Q8_0")
    assert (seen.layers, seen.hidden_size, seen.context_length, seen.vocab_size) == (2, 64, 256, 288)
    assert seen.n_parameters == done.n_parameters
    assert [use.type_name for use in seen.types] == ["Q8_0", "F32"]
    assert sum(use.n_tensors for use in seen.types) == len(seen.tensors) == done.n_tensors
    assert seen.n_bytes == done.n_bytes


def test_rows_of_a_drafter_with_two_kinds_of_layers(tmp_path):
    drafter = make_drafter(
        tmp_path / "drafter",
        1,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        without=["is_causal"],
    )
    target = make_target(tmp_path / "m.gguf", architecture="qwen35", mrope=True)
    convert(drafter, target, tmp_path / "out.gguf")
    rows = dict(inspect(tmp_path / "out.gguf").rows())
    assert rows["kind"] == "DFlash drafter (v1, no selector)"
    assert rows["sliding layers"] == "1, window 32 tokens, causal"
    assert rows["full layers"] == "1, not causal"
    assert rows["rope"] == "theta 10000, linear x4, M-RoPE sections 8, 0, 0, 0"
    assert rows["embeddings and head"] == "the target's"
    assert rows["taps (input of target layer)"] == "1, 3, 4"
    assert rows["taps (Hugging Face ids)"] == "0, 2, 3"
    assert "selector" not in rows


def test_other_models_show_their_basic_facts(target):
    seen = inspect(target)
    assert seen.drafter is None
    rows = dict(seen.rows())
    assert rows["kind"] == "qwen3 model"
    assert (rows["layers"], rows["hidden size"], rows["vocabulary"]) == ("5", "64", "288 tokens")
    assert rows["file type"] == "missing"
    assert "block size" not in rows
    assert seen.types[0] == TypeUse("Q8_0", 36, sum(t.n_bytes for t in seen.tensors if t.type_name == "Q8_0"))


def test_drafter_without_its_keys_says_missing(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = GGUFWriter(path, "dflash")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    rows = dict(inspect(path).rows())
    assert rows["block size"] == rows["mask token"] == rows["name"] == rows["taps (Hugging Face ids)"] == "missing"
    assert rows["rope"] == "theta missing"
    assert rows["full layers"] == "1, not causal"


def test_what_is_no_gguf_is_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(GGUFError, match=r"x\.gguf is not a GGUF file; give the path of a \.gguf model\.$"):
        inspect(path)
