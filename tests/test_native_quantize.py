"""llama.cpp's quantiser in this process: what would end the interpreter is an error, and its log stays ours."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from factories_kquants import make_wide_drafter, make_wide_target
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType

from dflash2.converter import convert
from dflash2.errors import GGUFError, NativeError
from dflash2.gguf_info import read_gguf_info
from dflash2.native import log, quantize_gguf
from dflash2.native.quantize import LARGEST_VALUE, WRITABLE_TYPES

Type, File = GGMLQuantizationType, LlamaFileType


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    target = make_wide_target(folder / "target.gguf")
    convert(make_wide_drafter(folder / "drafter"), target, folder / "bf16.gguf", outtype="bf16")
    return folder / "bf16.gguf"


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type_name for tensor in read_gguf_info(path).tensors}


def test_parameters_lie_where_this_library_keeps_them():
    """The defaults of the library at hand, read through the structure that the quantiser is called with."""
    params = llama_cpp.llama_model_quantize_default_params()
    assert params.nthread == 0
    assert params.ftype == File.MOSTLY_Q8_0
    assert params.output_tensor_type == params.token_embedding_type >= max(Type)
    flags = "allow_requantize", "quantize_output_tensor", "only_copy", "pure", "keep_split", "dry_run"
    assert [getattr(params, flag) for flag in flags] == [False, True, False, False, False, False]
    assert not any((params.imatrix, params.kv_overrides, params.tt_overrides, params.prune_layers))
    assert params.max_buf_size == 8 << 30


def test_parameters_are_laid_out_as_the_pinned_header_says(llama_cpp_source):
    header = (llama_cpp_source / "include" / "llama.h").read_text()
    body = re.search(r"typedef struct llama_model_quantize_params \{(.*?)\}", header, re.DOTALL)[1]
    fields = re.findall(r"([\w\s*]+?)\s*\b(\w+);", re.sub(r"//.*", "", body))
    c_types = {"int32_t": ctypes.c_int32, "bool": ctypes.c_bool, "size_t": ctypes.c_size_t}
    structure = llama_cpp.llama_model_quantize_params
    assert [name for _, name in fields] == [name for name, _ in structure._fields_]
    for (declared, name), (_, kind) in zip(fields, structure._fields_, strict=True):
        if declared.strip() in c_types:
            assert kind is c_types[declared.strip()], name
        else:
            assert ctypes.sizeof(kind) == (8 if "*" in declared else 4), name


def test_other_parameters_than_the_known_ones_are_refused(source, tmp_path, monkeypatch):
    """A library whose structure is laid out otherwise: what stands at the place of `ftype` is no Q8_0."""
    shifted = llama_cpp.llama_model_quantize_params()
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_quantize_default_params", lambda: shifted)
    with pytest.raises(NativeError, match=r"other parameters for quantising .* install llama-cpp-python 0\.3\.36\.$"):
        quantize_gguf(source, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0)


def test_tensors_named_keep_their_own_type(source, tmp_path):
    fixed = [("fc.weight", Type.F16), ("blk.1.ffn_down.weight", Type.Q8_0)]
    quantize_gguf(source, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_K_S, tensor_types=fixed)
    types = types_of(tmp_path / "out.gguf")
    assert types["fc.weight"] == "F16"
    assert types["blk.1.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == types["selector_hidden.weight"] == "Q4_K"
    assert types["blk.0.attn_conv_base"] == types["output_norm.weight"] == "F32"


def test_a_name_is_no_pattern(source, tmp_path):
    """`fc.weight` must not be found in a longer name, nor its dot stand for any character."""
    fixed = [("blk.0.attn_q.weight", Type.Q8_0)]
    quantize_gguf(source, tmp_path / "out.gguf", file_type=File.MOSTLY_Q6_K, tensor_types=fixed)
    types = types_of(tmp_path / "out.gguf")
    assert [name for name, kind in types.items() if kind == "Q8_0"] == ["blk.0.attn_q.weight"]


def test_progress_counts_tensors_up_to_all_of_them(source, tmp_path):
    seen = []
    quantize_gguf(source, tmp_path / "o", file_type=File.MOSTLY_Q4_0, progress=lambda *counts: seen.append(counts))
    total = len(read_gguf_info(source).tensors)
    assert seen == [(done, total) for done in range(total + 1)]


def test_the_log_goes_nowhere_and_its_receiver_comes_back(source, tmp_path, capfd):
    before = log_receiver()
    quantize_gguf(source, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0)
    assert log_receiver() == before
    assert capfd.readouterr() == ("", "")


def log_receiver() -> tuple[int | None, int | None]:
    callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
    return ctypes.cast(callback, ctypes.c_void_p).value, user_data.value


def test_what_progress_raises_comes_out_and_the_log_comes_back(source, tmp_path):
    before = log_receiver()
    calls = []

    def interrupted(done: int, total: int) -> None:
        calls.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_gguf(source, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0, progress=interrupted)
    assert len(calls) == 1
    assert log_receiver() == before


def test_pieces_of_the_log_arrive_with_their_level():
    pieces = []
    with log.captured_log(lambda level, text: pieces.append((level, text))):
        llama_cpp.llama_model_load_from_file(b"/nowhere.gguf", llama_cpp.llama_model_default_params())
    assert any(level == 4 and "nowhere" in text for level, text in pieces)


IMATRIX_FILES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"]


@pytest.mark.parametrize("name", IMATRIX_FILES)
def test_a_mixture_that_needs_an_importance_matrix_is_an_error_in_its_words(source, tmp_path, name):
    with pytest.raises(NativeError, match=r"cannot quantise .*bf16\.gguf: this quantization requires an imatrix!"):
        quantize_gguf(source, tmp_path / "out.gguf", file_type=File[f"MOSTLY_{name}"])


@pytest.mark.parametrize("kind", sorted(set(Type) - WRITABLE_TYPES))
def test_a_tensor_type_the_quantiser_would_die_of_is_refused(source, tmp_path, kind):
    with pytest.raises(NativeError, match=f"'fc.weight' cannot be written as {kind.name} without an importance matrix"):
        quantize_gguf(source, tmp_path / "o", file_type=File.MOSTLY_Q4_0, tensor_types=[("fc.weight", kind)])


def test_a_row_that_does_not_hold_the_blocks_is_refused(tmp_path):
    path = odd_source(tmp_path / "odd.gguf", np.zeros((4, 64), np.float32))
    with pytest.raises(NativeError, match=r"rows of tensor 'fc\.weight' hold 64 values, Q4_K needs a multiple of 256"):
        quantize_gguf(path, tmp_path / "o", file_type=File.MOSTLY_Q4_0, tensor_types=[("fc.weight", Type.Q4_K)])


def odd_source(path: Path, values: np.ndarray, raw_dtype: Type | None = None, layers: int = 1) -> Path:
    """A drafter file as far as the quantiser looks."""
    writer = GGUFWriter(path, "dflash")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_array("dflash.target_layers", [1])
    writer.add_tensor("fc.weight", values, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 65536.0, -1e30])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_would_abort_the_search_for_a_grid_point_are_refused(tmp_path, value, dtype):
    values = np.zeros((2, 256), np.float32)
    values[1, 7] = value
    with np.errstate(over="ignore"):
        stored = {
            "F32": lambda: values,
            "F16": lambda: values.astype(np.float16),
            "BF16": lambda: (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(2, -1),
        }[dtype]()
    path = odd_source(tmp_path / "odd.gguf", stored, Type[dtype])
    with pytest.raises(NativeError, match=r"'fc\.weight' has values that no quantised type can hold"):
        quantize_gguf(path, tmp_path / "out.gguf", file_type=File.MOSTLY_IQ3_S)


@pytest.mark.parametrize("kind", sorted(WRITABLE_TYPES - {Type.F32, Type.F16, Type.BF16}))
def test_any_values_within_the_range_are_quantised(tmp_path, kind):
    """Spikes, ties, zeros, tiny and huge values; a failed assertion would end this process."""
    random = np.random.default_rng(0)
    values = random.normal(0, 1, (24, 256)).astype(np.float32)
    values[0] = 0
    values[1] = LARGEST_VALUE
    values[2] = -LARGEST_VALUE
    values[3, ::2] = 0
    values[4] = 1e-30
    values[5] *= 1e-20
    values[6, 5] = LARGEST_VALUE
    values[7] = np.sign(values[7]) * LARGEST_VALUE
    values[8] = np.float32(1e-45)
    values[9] = np.exp(random.normal(0, 8, 256)).clip(0, LARGEST_VALUE)
    path = odd_source(tmp_path / "odd.gguf", values)
    fixed = [("fc.weight", kind)]
    quantize_gguf(path, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0, tensor_types=fixed)
    assert types_of(tmp_path / "out.gguf")["fc.weight"] == kind.name


def test_a_quantised_source_is_refused(source, tmp_path):
    quantize_gguf(source, tmp_path / "q8.gguf", file_type=File.MOSTLY_Q8_0)
    with pytest.raises(NativeError, match=r"is Q8_0; quantise an F32, F16 or BF16 file instead"):
        quantize_gguf(tmp_path / "q8.gguf", tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0)


@pytest.mark.parametrize("layers", [0, 513])
def test_more_layers_than_llama_cpp_takes_are_refused(tmp_path, layers):
    path = odd_source(tmp_path / "odd.gguf", np.zeros((1, 256), np.float32), layers=layers)
    with pytest.raises(NativeError, match=f"has {layers} layers; llama.cpp takes 1 to 512"):
        quantize_gguf(path, tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0)


def test_a_file_is_not_quantised_onto_itself(source):
    before = source.read_bytes()
    with pytest.raises(NativeError, match="onto itself"):
        quantize_gguf(source, source, file_type=File.MOSTLY_Q4_0)
    assert source.read_bytes() == before


def test_a_source_that_is_no_gguf_file_is_an_error(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(GGUFError):
        quantize_gguf(tmp_path / "text.gguf", tmp_path / "out.gguf", file_type=File.MOSTLY_Q4_0)


def test_an_output_that_cannot_be_opened_is_an_error(source, tmp_path):
    with pytest.raises(OSError, match="is the disk full"):
        quantize_gguf(source, tmp_path / "no folder" / "out.gguf", file_type=File.MOSTLY_Q4_0)


NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from gguf.constants import LlamaFileType
from dflash2.native import quantize_gguf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    quantize_gguf(Path(sys.argv[1]), Path(sys.argv[2]), file_type=LlamaFileType.MOSTLY_Q4_0)
    print("done")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.parametrize("limit", [100, 60_000, 200_000])
def test_no_more_room_on_disk_is_noticed(source, tmp_path, limit):
    command = [sys.executable, "-c", NO_ROOM, str(source), str(tmp_path / "out.gguf"), str(limit)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("is the disk full?")
