"""torch.save's files are read without unpickling: values come back, code does not run."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from dflash2.converter.dialects.torch_file import read_torch_file
from dflash2.errors import CheckpointError, UnsupportedCheckpointError


class Hostile:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def write_archive(path, pickled, storages=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in enumerate(storages):
            archive.writestr(f"archive/data/{key}", data)
    return path


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "int32"])
def test_tensors_of_torch_save_come_back(torch, tmp_path, dtype):
    tensor = torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3) - 2
    path = tmp_path / "saved.pt"
    torch.save({"mask_token_id": 151669, "embedding": tensor, "more": [1.5, None, True, ("a", 2)]}, path)
    saved = read_torch_file(path)
    assert np.array_equal(saved["embedding"], tensor.double().numpy())
    assert (saved["mask_token_id"], saved["more"]) == (151669, [1.5, None, True, ("a", 2)])


def test_parameters_slices_and_shared_storages_come_back(torch, tmp_path):
    whole = torch.arange(12.0)
    path = tmp_path / "saved.pt"
    torch.save({"slice": whole[4:8], "parameter": torch.nn.Parameter(whole), "scalar": torch.tensor(3.0)}, path)
    saved = read_torch_file(path)
    assert saved["slice"].tolist() == [4, 5, 6, 7]
    assert saved["parameter"].tolist() == list(range(12))
    assert saved["scalar"] == 3.0


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_the_pickle_does_not_run(tmp_path, protocol):
    made = tmp_path / "made-by-the-pickle"
    path = write_archive(tmp_path / "hostile.pt", pickle.dumps({"embedding": Hostile(made)}, protocol))
    with pytest.raises(UnsupportedCheckpointError, match=r"hostile\.pt holds the name '(posix|nt)\.mkdir'"):
        read_torch_file(path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "the name 'os.system'"),
        (b"cbuiltins\neval\n.", "the name 'builtins.eval'"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "a call that makes no tensor"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "damaged pickle"),
        (b"\x80\x02}(X\x01\x00\x00\x00au.", "damaged pickle"),
        (b"\x80\x02(X\x01\x00\x00\x00aX\x01\x00\x00\x00bi.", "damaged pickle"),
        (b"\x80\x02]b.", "the pickle opcode BUILD"),
        (b"\x80\x02h\x05.", "damaged pickle"),
        (b"\x80\x020.", "the pickle opcode POP"),
        (b"\x80\x02.", "damaged pickle"),
        (b"\x80\x02}", "damaged pickle"),
        (b"", "damaged pickle"),
        (b"\x80\x02" + b"N" * 100_010 + b".", "more than 100000 opcodes"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "damaged pickle"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", None),
    ],
)
def test_strange_pickles_are_refused(tmp_path, pickled, message):
    path = write_archive(tmp_path / "strange.pt", pickled)
    if message is None:
        assert read_torch_file(path) is None
        return
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(path)


def storage_reference(offset=0, shape=(2,), strides=(1,), n=2, kind=b"FloatStorage"):
    """A pickle of one tensor over storage 0 of `n` values."""
    buffer = io.BytesIO()

    def tuple_of(values):
        return b"(" + b"".join(b"J" + value.to_bytes(4, "little", signed=True) for value in values) + b"t"

    buffer.write(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n" + kind + b"\n")
    buffer.write(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ" + n.to_bytes(4, "little") + b"tQ")
    buffer.write(b"J" + offset.to_bytes(4, "little", signed=True) + tuple_of(shape) + tuple_of(strides))
    buffer.write(b"\x89ccollections\nOrderedDict\n)RtR.")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1}, "a tensor of 2 values at 1 in a storage of 2"),
        ({"offset": -1}, "damaged pickle"),
        ({"shape": (1 << 30,)}, "damaged pickle"),
        ({"shape": (-2,)}, "damaged pickle"),
        ({"strides": (1 << 20,)}, "not contiguous"),
        ({"n": 3}, "storage 0 has 2 values instead of 3"),
        ({"kind": b"UntypedStorage"}, "the name 'torch.UntypedStorage'"),
    ],
)
def test_tensors_outside_of_their_storage_are_refused(tmp_path, changes, message):
    data = np.array([1.0, 2.0], np.float32).tobytes()
    good = write_archive(tmp_path / "good.pt", storage_reference(), [data])
    assert read_torch_file(good).tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(write_archive(tmp_path / "bad.pt", storage_reference(**changes), [data]))


def test_missing_storage_compression_and_other_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="lacks 'archive/data/0'"):
        read_torch_file(write_archive(tmp_path / "a.pt", storage_reference()))
    bomb = write_archive(tmp_path / "b.pt", storage_reference(), [bytes(1 << 20)], zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedCheckpointError, match="is compressed"):
        read_torch_file(bomb)
    legacy = tmp_path / "legacy.pt"
    legacy.write_bytes(pickle.dumps({"embedding": [1.0]}))
    with pytest.raises(CheckpointError, match="not a zip file as"):
        read_torch_file(legacy)
    with pytest.raises(CheckpointError, match="Cannot read"):
        read_torch_file(tmp_path / "absent.pt")
