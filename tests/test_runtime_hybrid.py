"""A target with recurrent layers steps back by the snapshots it keeps."""

import gguf
import numpy as np
import pytest
from generation import take_greedy as take
from llama_cpp import Llama

from dflash2 import Dflash2Error, DFlashLlama
from dflash2.gguf_info import read_gguf_info

EXACT = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
HIDDEN, HEADS, LAYERS, FFN = 288, 6, 6, 256


@pytest.fixture(scope="module")
def hybrid(target_path, n_vocab, tmp_path_factory):
    """A random LFM2 (short convolutions, attention in every third layer) with the demo target's vocabulary."""
    path = tmp_path_factory.mktemp("hybrid") / "lfm2.gguf"
    attention = [il % 3 == 2 for il in range(LAYERS)]
    writer = gguf.GGUFWriter(str(path), "lfm2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([2 if attends else 0 for attends in attention])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(n_vocab)
    writer.add_uint32("lfm2.shortconv.l_cache", 3)
    info = read_gguf_info(target_path)
    for key, value in info.metadata.items():
        kind = info.value_types[key]
        if key.startswith("tokenizer."):
            stored = list(value) if kind.element is not None else value
            writer.add_key_value(key, stored, kind.kind, kind.element)
    rng = np.random.default_rng(7)

    def add(name, *shape):
        spread = rng.normal(0.0, shape[-1] ** -0.5, shape) if len(shape) > 1 else np.ones(shape)
        values = spread.astype(np.float32)
        if len(shape) > 1 and "conv.conv" not in name:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", n_vocab, HIDDEN)
    add("token_embd_norm.weight", HIDDEN)
    for il, attends in enumerate(attention):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{il}.{norm}.weight", HIDDEN)
        add(f"blk.{il}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{il}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{il}.ffn_down.weight", HIDDEN, FFN)
        if attends:
            for norm in ("attn_q_norm", "attn_k_norm"):
                add(f"blk.{il}.{norm}.weight", HIDDEN // HEADS)
            add(f"blk.{il}.attn_q.weight", HIDDEN, HIDDEN)
            add(f"blk.{il}.attn_k.weight", 2 * HIDDEN // HEADS, HIDDEN)
            add(f"blk.{il}.attn_v.weight", 2 * HIDDEN // HEADS, HIDDEN)
            add(f"blk.{il}.attn_output.weight", HIDDEN, HIDDEN)
        else:
            add(f"blk.{il}.shortconv.conv.weight", HIDDEN, 3)
            add(f"blk.{il}.shortconv.in_proj.weight", 3 * HIDDEN, HIDDEN)
            add(f"blk.{il}.shortconv.out_proj.weight", HIDDEN, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("depth", [7, 2, 0])
def test_tokens_of_a_hybrid_target_equal_those_of_plain_llama(hybrid, drafter_gguf, depth):
    plain = Llama(str(hybrid), **EXACT)
    drafted = DFlashLlama(hybrid, drafter_gguf, depth=depth, auto_disable=False, **EXACT)
    for prompt in ([40, 41, 42, 43, 44], [40, 41, 300, 301], [40, 41, 300, 301, 302, 303]):
        assert take(drafted, prompt, 100) == take(plain, prompt, 100)
    assert (drafted.stats.cycles > 0) == (depth > 0)
    for llama in (plain, drafted):
        llama.close()


def test_a_depth_beyond_the_snapshots_is_refused(hybrid, drafter_gguf):
    drafted = DFlashLlama(hybrid, drafter_gguf, depth=3, **EXACT)
    with pytest.raises(Dflash2Error, match="keeps 3 snapshots"):
        drafted.depth = 7
    assert drafted.depth == 3
    drafted.close()
