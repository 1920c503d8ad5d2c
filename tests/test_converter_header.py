"""The header writer: what it writes is what both readers read back."""

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.converter.entry import Entry
from dflash2.converter.header import header
from dflash2.gguf_info import ValueType, read_gguf_info

_Kind = GGUFValueType
INTEGERS = {
    _Kind.UINT8: (0, 2**8 - 1),
    _Kind.INT8: (-(2**7), 2**7 - 1),
    _Kind.UINT16: (0, 2**16 - 1),
    _Kind.INT16: (-(2**15), 2**15 - 1),
    _Kind.UINT32: (0, 2**32 - 1),
    _Kind.INT32: (-(2**31), 2**31 - 1),
    _Kind.UINT64: (0, 2**64 - 1),
    _Kind.INT64: (-(2**63), 2**63 - 1),
}
VALUES = {kind: st.integers(*limits) for kind, limits in INTEGERS.items()} | {
    _Kind.FLOAT32: st.floats(width=32, allow_nan=False),
    _Kind.FLOAT64: st.floats(allow_nan=False),
    _Kind.BOOL: st.booleans(),
    _Kind.STRING: st.text(max_size=20),
}
SCALARS = st.sampled_from(sorted(VALUES)).flatmap(lambda kind: st.tuples(VALUES[kind], st.just(ValueType(kind))))
ARRAYS = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.tuples(st.lists(VALUES[kind], max_size=5).map(tuple), st.just(ValueType(_Kind.ARRAY, kind)))
)
KEYS = st.text(min_size=1, max_size=20).filter(lambda key: not key.startswith("general."))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(KEYS, SCALARS | ARRAYS, max_size=8))
def test_metadata_comes_back_with_its_types(tmp_path, metadata):
    path = tmp_path / "x.gguf"
    entries = [Entry(key, value, kind) for key, (value, kind) in metadata.items()]
    path.write_bytes(header("dflash", entries, []))
    info = read_gguf_info(path)
    assert dict(info.metadata) == {"general.architecture": "dflash"} | {entry.key: entry.value for entry in entries}
    assert {key: info.value_types[key] for key in metadata} == {entry.key: entry.type for entry in entries}


def test_the_library_reads_the_same(tmp_path):
    path = tmp_path / "x.gguf"
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    entries = [
        Entry("a.text", "häß\udcff", ValueType(_Kind.STRING)),
        Entry("a.list", ("x", ""), ValueType(_Kind.ARRAY, _Kind.STRING)),
        Entry("a.number", 7, ValueType(_Kind.UINT32)),
    ]
    rows = [("one", (2, 32), GGMLQuantizationType.F32, 0), ("two", (32,), GGMLQuantizationType.I64, 256)]
    head = header("dflash", entries, rows)
    assert len(head) % 32 == 0
    path.write_bytes(head + values.tobytes() + np.arange(32, dtype=np.int64).tobytes())
    reader = gguf.GGUFReader(path)
    assert bytes(reader.fields["a.text"].parts[-1]) == b"h\xc3\xa4\xc3\x9f\xff"
    assert reader.fields["a.list"].contents() == ["x", ""]
    assert reader.fields["a.number"].contents() == 7
    assert [tensor.name for tensor in reader.tensors] == ["one", "two"]
    assert (reader.tensors[0].data == values).all()
    assert reader.tensors[1].data.tolist() == list(range(32))
