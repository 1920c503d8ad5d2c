"""Cost-scaled targets: more weights, the same function."""

import numpy as np
import pytest
from gguf import GGUFReader
from llama_cpp import Llama

from dflash2.errors import GGUFError
from dflash2.evidence import scaled_target
from dflash2.gguf_info import read_gguf_info

PARAMETERS = 12_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_CACHE", str(tmp_path))


def logits(path):
    """Logits of 40 tokens evaluated at once, [40, vocabulary]."""
    llm = Llama(str(path), n_ctx=64, logits_all=True, verbose=False)
    llm.eval(list(range(5, 45)))
    scores = llm.scores[:40].copy()
    llm.close()
    return scores


def n_parameters(path):
    return sum(int(np.prod(tensor.shape)) for tensor in read_gguf_info(path).tensors)


@pytest.mark.parametrize("weights", ["f16", "q8_0", "f32"])
def test_widening_changes_no_bit_of_the_output(weights, target_path):
    narrow = scaled_target(target_path, parameters=0, weights=weights)
    wide = scaled_target(target_path, parameters=PARAMETERS, weights=weights)
    assert np.array_equal(logits(narrow), logits(wide))


def test_weights_of_the_right_type_already_are_kept_bit_for_bit(target_path):
    copy = scaled_target(target_path, parameters=0, weights="q8_0")
    kept = {tensor.name: tensor.data for tensor in GGUFReader(copy).tensors}
    for tensor in GGUFReader(target_path).tensors:
        assert np.array_equal(kept[tensor.name], tensor.data), tensor.name


def test_copy_has_the_parameters_asked_for(target_path):
    info = read_gguf_info(target_path)
    per_row = 3 * info.integer(info.own("block_count")) * info.integer(info.own("embedding_length"))
    count = n_parameters(scaled_target(target_path, parameters=PARAMETERS))
    assert PARAMETERS <= count < PARAMETERS + 256 * per_row


def test_only_file_type_and_feed_forward_length_change_in_the_metadata(target_path):
    before = read_gguf_info(target_path)
    after = read_gguf_info(scaled_target(target_path, parameters=PARAMETERS, weights="f16"))
    assert before.metadata.keys() == after.metadata.keys()
    changed = {key for key, value in before.metadata.items() if after.metadata[key] != value}
    assert changed == {"general.file_type", "qwen3.feed_forward_length"}
    assert before.value_types == after.value_types
    wide = after.integer("qwen3.feed_forward_length")
    assert after.tensor("blk.0.ffn_gate.weight").shape == (before.integer("qwen3.embedding_length"), wide)


def test_second_call_returns_the_same_file_untouched(target_path):
    first = scaled_target(target_path, parameters=PARAMETERS)
    made = first.stat().st_mtime_ns
    assert scaled_target(target_path, parameters=PARAMETERS) == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in first.parent.glob("*.gguf*")] == [first.name]


def test_another_target_gets_another_copy(target_path, tmp_path):
    other = tmp_path / target_path.name
    data = bytearray(target_path.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    assert scaled_target(other, parameters=0) != scaled_target(target_path, parameters=0)


def test_a_drafter_is_refused(drafter_gguf):
    with pytest.raises(GGUFError, match="only dense qwen3 models"):
        scaled_target(drafter_gguf)
