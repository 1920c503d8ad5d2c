"""The safetensors reader accepts what the safetensors library accepts and refuses the rest by name."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from factories import safetensors_bytes, save_safetensors, stored_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.converter.safetensors_file import read_safetensors
from dflash2.errors import CheckpointError


def test_tensors_are_those_the_library_sees(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.full((4,), 1.5, np.float32)}
    save_safetensors(path, tensors, "F32")
    stored = {tensor.name: tensor for tensor in read_safetensors(path)}
    with safetensors.safe_open(path, framework="numpy") as library:
        assert set(library.keys()) == set(stored)
        for name, tensor in stored.items():
            assert tensor.shape == tuple(library.get_slice(name).get_shape())
            assert tensor.dtype == library.get_slice(name).get_dtype()
            assert tensor.read(0, tensor.n_bytes).tobytes() == library.get_tensor(name).tobytes()


def test_parts_of_a_tensor_are_read(tmp_path):
    path = tmp_path / "x.safetensors"
    values = np.arange(100, dtype=np.float32)
    save_safetensors(path, {"skipped": values, "a": values}, "BF16")
    tensor = read_safetensors(path)[1]
    assert tensor.read(20, 60).tobytes() == stored_bytes(values, "BF16")[20:80]


def test_file_cut_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": np.ones(64, np.float32)}, "F32")
    tensor = read_safetensors(path)[0]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"is truncated in tensor 'a'; download it again\.$"):
        tensor.read(0, tensor.n_bytes)


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, r"tensor 'b' overlaps another or leaves a gap"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, 12, r"tensor 'b' overlaps another or leaves a gap"),
    "bytes after the end": ({"a": entry(0, 4)}, 12, r"has 8 bytes that belong to no tensor"),
    "too few bytes": ({"a": entry(0, 400)}, 12, r"is truncated: \d+ bytes instead of \d+"),
    "size and shape": ({"a": entry(0, 8, shape=[3])}, 8, r"tensor 'a' has offsets that do not fit its shape"),
    "reversed": ({"a": entry(8, 0, shape=[2])}, 8, r"tensor 'a' has offsets that do not fit its shape"),
    "negative": ({"a": entry(-8, 0, shape=[2])}, 8, r"tensor 'a' has a damaged shape or offsets"),
    "absurd": ({"a": entry(0, 2**70, shape=[2**68])}, 8, r"tensor 'a' has a damaged shape or offsets"),
    "nine dimensions": ({"a": entry(0, 4, shape=[1] * 9)}, 4, r"tensor 'a' has a damaged shape or offsets"),
    "three offsets": ({"a": entry(0, 8) | {"data_offsets": [0, 4, 8]}}, 8, r"'a' has a damaged shape or offsets"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, r"'a' has a damaged shape or offsets"),
    "dtype": ({"a": entry(0, 4, dtype="F31")}, 4, r"tensor 'a' has the unknown dtype 'F31'"),
    "no object": ({"a": 3}, 4, r"the header entry of 'a' is not a JSON object"),
    "list": ([1], 0, r"its header is not a JSON object"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_named(tmp_path, case):
    header, n_data, message = HEADERS[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(json.dumps(header), bytes(n_data)))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(str(path))


def test_name_twice_in_one_header_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    one = json.dumps(entry(0, 4))
    path.write_bytes(safetensors_bytes(f'{{"a": {one}, "a": {one}}}', bytes(4)))
    with pytest.raises(CheckpointError, match=r"its header is not valid JSON \(the name 'a' appears twice\)\.$"):
        read_safetensors(path)


def test_absurd_header_length_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match=r"its header does not fit"):
        read_safetensors(path)


def read_by_library(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="numpy") as library:
            return bool(library.keys()) or True
    except safetensors.SafetensorError:
        return False


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), min_size=1, max_size=4))
def test_nothing_the_library_refuses_is_accepted(tmp_path, edits):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": np.ones((2, 2), np.float32), "b": np.ones(8, np.float32)}, "F32")
    raw = bytearray(path.read_bytes())
    for position, value in edits:
        raw[position % len(raw)] = value
    path.write_bytes(raw)
    try:
        read_safetensors(path)
    except CheckpointError as error:
        assert str(error).startswith(str(path))
    else:
        assert read_by_library(path)
