"""The GGUF header reader: exact values and types, and one clear sentence for every damaged file."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.errors import GGUFError
from dflash2.gguf_info import TensorInfo, ValueType, decode_value, read_gguf_info


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "qwen3")
    writer.add_uint32("qwen3.block_count", 6)
    writer.add_float32("qwen3.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_key_value("qwen3.rope.dimension_sections", [32, 0, 0, 0], GGUFValueType.ARRAY, GGUFValueType.INT32)
    writer.add_tensor("norm.weight", np.arange(4, dtype=np.float32))
    writer.add_tensor("half.weight", np.ones((3, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_values_are_python_values(small_gguf):
    info = read_gguf_info(small_gguf)
    assert info.architecture == "qwen3"
    assert info.integer(info.own("block_count")) == 6
    assert info.metadata["qwen3.rope.freq_base"] == 10000.0
    assert info.metadata["tokenizer.ggml.add_bos_token"] is False
    assert info.metadata["tokenizer.ggml.tokens"] == ("a", "é", "")
    assert info.metadata["qwen3.rope.dimension_sections"] == (32, 0, 0, 0)


def test_value_types_are_those_of_the_file(small_gguf):
    types = read_gguf_info(small_gguf).value_types
    assert types["qwen3.block_count"] == ValueType(GGUFValueType.UINT32)
    assert types["tokenizer.ggml.tokens"] == ValueType(GGUFValueType.ARRAY, GGUFValueType.STRING)
    assert types["qwen3.rope.dimension_sections"] == ValueType(GGUFValueType.ARRAY, GGUFValueType.INT32)


def test_tensor_table_has_ggml_shapes_types_and_places(small_gguf):
    info = read_gguf_info(small_gguf)
    norm, half = info.tensors
    assert norm == TensorInfo("norm.weight", (4,), "F32", norm.offset, 16)
    assert half == TensorInfo("half.weight", (64, 3), "F16", norm.offset + 32, 384)
    raw = small_gguf.read_bytes()[norm.offset : norm.offset + norm.n_bytes]
    assert np.frombuffer(raw, np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert info.tensor("half.weight") is half


def test_unknown_tensor_and_wrong_kind_of_key_are_named(small_gguf):
    info = read_gguf_info(small_gguf)
    with pytest.raises(GGUFError, match=r"has no tensor 'fc\.weight'"):
        info.tensor("fc.weight")
    with pytest.raises(GGUFError, match=r"'qwen3\.rope\.freq_base' is not an integer"):
        info.integer("qwen3.rope.freq_base")
    assert info.integer("qwen3.missing") is None


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all"])
def test_other_files_are_not_gguf(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=r"is not a GGUF file"):
        read_gguf_info(path)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(GGUFError, match=r"Cannot read .*gone\.gguf: No such file or directory\."):
        read_gguf_info(tmp_path / "gone.gguf")
    with pytest.raises(GGUFError, match=r"Cannot read .*: Is a directory\."):
        read_gguf_info(tmp_path)


def test_every_truncation_is_an_error(small_gguf, tmp_path):
    raw = small_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(4, len(raw), 13):
        path.write_bytes(raw[:size])
        with pytest.raises(GGUFError, match=r"truncated"):
            read_gguf_info(path)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions_and_byte_orders_are_refused(small_gguf, tmp_path, version):
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + small_gguf.read_bytes()[8:])
    with pytest.raises(GGUFError, match=r"only little-endian versions 2 and 3 are read"):
        read_gguf_info(path)


def test_text_that_is_not_utf8_survives(tmp_path):
    path = tmp_path / "bytes.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_key_value("tokenizer.ggml.tokens", [b"\xff\xfe", b"ok"], GGUFValueType.ARRAY, GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokens = read_gguf_info(path).metadata["tokenizer.ggml.tokens"]
    assert [t.encode("utf-8", "surrogateescape") for t in tokens] == [b"\xff\xfe", b"ok"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(4, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_headers_never_raise_anything_else(small_gguf, tmp_path, edits):
    raw = bytearray(small_gguf.read_bytes())
    for position, value in edits:
        raw[position] = value
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw)
    try:
        read_gguf_info(path)
    except GGUFError as error:
        assert str(path) in str(error)


def test_encoded_is_what_stands_after_the_key(small_gguf):
    info = read_gguf_info(small_gguf)
    tokens = info.encoded("tokenizer.ggml.tokens")
    assert tokens == struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, 3) + b"".join(
        struct.pack("<Q", len(text)) + text for text in (b"a", "é".encode(), b"")
    )
    assert decode_value(tokens) == ("a", "é", "")
    assert info.encoded("qwen3.block_count") == struct.pack("<II", GGUFValueType.UINT32, 6)
    raw = small_gguf.read_bytes()
    for key in info.metadata:
        assert raw.count(key.encode() + info.encoded(key)) == 1


def test_the_length_of_an_array_is_known_without_reading_it(small_gguf):
    info = read_gguf_info(small_gguf)
    lengths = [
        info.length(key) for key in ("tokenizer.ggml.tokens", "qwen3.rope.dimension_sections", "general.name", "no")
    ]
    assert lengths == [3, 4, None, None]


def test_values_are_read_once_and_outlive_the_file(small_gguf):
    info = read_gguf_info(small_gguf)
    small_gguf.unlink()
    tokens = info.metadata["tokenizer.ggml.tokens"]
    assert tokens == ("a", "é", "")
    assert info.metadata["tokenizer.ggml.tokens"] is tokens
    assert list(info.metadata) == list(info.value_types)
    assert len(info.metadata) == 6


def test_a_string_that_ends_beyond_the_file_is_seen_without_reading_it(tmp_path):
    path = tmp_path / "long.gguf"
    for length in (2**63, 2**64 - 1, 2**40):
        array = struct.pack("<IIQQ", GGUFValueType.ARRAY, GGUFValueType.STRING, 2, length) + bytes(64)
        path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + array)
        with pytest.raises(GGUFError, match=r"truncated"):
            read_gguf_info(path)
