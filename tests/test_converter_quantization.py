"""Output types beyond the direct ones, and types of single tensors: what the file holds and what is said about it."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import make_drafter, make_target
from factories_kquants import make_wide_drafter, make_wide_target
from gguf.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.quants import dequantize

from dflash2 import DFlashLlama
from dflash2.converter import DIRECT_TYPES, OUT_TYPES, TENSOR_TYPES, convert
from dflash2.errors import CheckpointError, NativeError, OutputError
from dflash2.gguf_info import GGUFInfo, read_gguf_info
from dflash2.native import quantize_gguf
from dflash2.native.quantize import WRITABLE_TYPES

MIXTURES = [name for name in OUT_TYPES if name not in DIRECT_TYPES]
# Root mean square of the rounding error over that of normally distributed weights; a wrong block layout gives 1.
ERROR = {
    "Q8_0": 0.01, "Q6_K": 0.025, "Q5_K": 0.045, "Q5_1": 0.045, "Q5_0": 0.055, "Q4_K": 0.08, "IQ4_NL": 0.09,
    "IQ4_XS": 0.09, "Q4_1": 0.09, "Q4_0": 0.11, "Q3_K": 0.17, "IQ3_S": 0.19, "Q2_K": 0.32, "F32": 0.0, "BF16": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_wide_target(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return make_wide_drafter(tmp_path_factory.mktemp("drafter") / "Wide-DFlash2")


@pytest.fixture(scope="module")
def exact(tmp_path_factory, drafter, target) -> GGUFInfo:
    output = tmp_path_factory.mktemp("exact") / "exact.gguf"
    convert(drafter, target, output, outtype="f32")
    return read_gguf_info(output)


def values_of(info: GGUFInfo, name: str) -> np.ndarray:
    tensor = info.tensor(name)
    raw = np.fromfile(info.path, np.uint8, tensor.n_bytes, offset=tensor.offset)
    return dequantize(raw.reshape(-1, tensor.n_bytes), GGMLQuantizationType[tensor.type_name]).reshape(
        tensor.shape[::-1]
    )


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type_name for tensor in read_gguf_info(path).tensors}


@pytest.mark.parametrize("outtype", MIXTURES)
def test_every_mixture_is_the_same_drafter_rounded_and_drafts_in_llama_cpp(tmp_path, drafter, target, exact, outtype):
    done = convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    info = read_gguf_info(tmp_path / "out.gguf")
    number = info.metadata["general.file_type"]
    assert LlamaFileType(number).name == f"MOSTLY_{outtype.upper()}"
    assert done.outtype == outtype
    assert done.notes == ()
    assert dict(info.metadata) == {**exact.metadata, "general.file_type": number}
    assert dict(info.value_types) == dict(exact.value_types)
    assert [(t.name, t.shape) for t in info.tensors] == [(t.name, t.shape) for t in exact.tensors]
    for tensor in exact.tensors:
        before, after = values_of(exact, tensor.name), values_of(info, tensor.name)
        bound = ERROR[info.tensor(tensor.name).type_name]
        assert np.sqrt(((after - before) ** 2).mean()) <= bound * np.sqrt((before**2).mean()), tensor.name
    wanted = next(kind for kind in ERROR if outtype.upper().startswith(kind) or kind == f"{outtype[:3].upper()}_S")
    assert wanted in types_of(info.path).values()
    assert drafts(target, info.path) > 0


def drafts(target: Path, drafter: Path) -> int:
    """Cycles of a short greedy run."""
    llama = DFlashLlama(
        target, drafter, n_ctx=64, n_threads=1, n_threads_batch=1, depth=None, auto_disable=False, verbose=False
    )
    stream = llama.generate(llama.tokenize(b"ab"), temp=0.0)
    for _ in range(8):
        next(stream)
    stream.close()
    cycles = llama.stats.cycles
    llama.close()
    return cycles


@pytest.mark.parametrize("outtype", OUT_TYPES)
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_every_type_takes_every_dtype_of_a_checkpoint(tmp_path, target, dtype, outtype):
    drafter = make_wide_drafter(tmp_path / "drafter", 1, dtype=dtype)
    done = convert(drafter, target, tmp_path / "out.gguf", outtype=outtype.upper())
    assert done.outtype == outtype
    assert types_of(tmp_path / "out.gguf")["output_norm.weight"] == "F32"


def test_lists_of_types_and_of_what_llama_cpp_writes_agree():
    assert {kind.name.lower() for kind in WRITABLE_TYPES} == set(TENSOR_TYPES)


@pytest.mark.parametrize("file_type", sorted(LlamaFileType))
def test_types_offered_are_those_llama_cpp_makes_without_an_importance_matrix(exact, tmp_path, file_type):
    """But for types made for ternary models and for experts."""
    name = file_type.name.split("_", 1)[-1].lower()
    try:
        quantize_gguf(exact.path, tmp_path / "out.gguf", file_type=file_type)
    except NativeError as error:
        assert "imatrix" in str(error) or "invalid output file type" in str(error)
        assert name not in OUT_TYPES
        with pytest.raises(OutputError, match="importance matrix" if "imatrix" in str(error) else "is not known"):
            convert(Path(), Path(), tmp_path / "out.gguf", outtype=name)
    else:
        assert name in (*OUT_TYPES, "tq1_0", "tq2_0", "q1_0", "q2_0", "mxfp4_moe")


@pytest.mark.parametrize(
    ("outtype", "says"),
    [
        ("IQ2_XS", r"^Output type 'IQ2_XS' needs an importance matrix, .*; choose one of f32, .*, q2_k\.$"),
        ("q2_k_s", "importance matrix"),
        ("TQ1_0", "is for models trained with weights of two or three values"),
        ("MXFP4_MOE", "is for experts, which a drafter does not have"),
        ("q4_k_xl", r"^Output type 'q4_k_xl' is not known"),
    ],
)
def test_refused_types_say_why(tmp_path, drafter, target, outtype, says):
    with pytest.raises(OutputError, match=says):
        convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("alias", "name"), [("Q4_K", "q4_k_m"), ("q3_k", "q3_k_m"), ("Q5_k", "q5_k_m")])
def test_short_names_mean_the_medium_mixture(tmp_path, drafter, target, alias, name):
    assert convert(drafter, target, tmp_path / "out.gguf", outtype=alias).outtype == name


def test_tensors_named_get_their_type_in_a_mixture(tmp_path, drafter, target):
    rules = [("fc", "Q8_0"), (r"blk\.1\.ffn_(up|gate)", "q6_k"), ("*_conv_proj", "bf16"), ("ffn_up", "f32")]
    convert(drafter, target, tmp_path / "out.gguf", outtype="q4_k_s", tensor_types=rules)
    types = types_of(tmp_path / "out.gguf")
    assert types["fc.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == types["blk.1.ffn_gate.weight"] == "Q6_K"
    assert types["blk.0.ffn_up.weight"] == "F32"
    assert types["blk.0.attn_conv_proj.weight"] == types["blk.1.ffn_conv_proj.weight"] == "BF16"
    assert types["blk.0.ffn_gate.weight"] == types["selector_successor.weight"] == "Q4_K"


def test_tensors_named_get_their_type_in_a_direct_file(tmp_path, drafter, target):
    rules = [("fc", "f32"), ("selector_", "f16"), ("ffn_down", "Q8_0")]
    convert(drafter, target, tmp_path / "out.gguf", outtype="bf16", tensor_types=rules)
    types = types_of(tmp_path / "out.gguf")
    assert types["fc.weight"] == "F32"
    assert types["selector_hidden.weight"] == types["selector_predecessor.weight"] == "F16"
    assert types["blk.0.ffn_down.weight"] == "Q8_0"
    assert types["blk.0.ffn_up.weight"] == "BF16"
    assert read_gguf_info(tmp_path / "out.gguf").metadata["general.file_type"] == LlamaFileType.MOSTLY_BF16


@pytest.mark.parametrize("outtype", DIRECT_TYPES)
def test_a_direct_file_with_one_tensor_for_llama_cpp_is_otherwise_the_same_bytes(tmp_path, drafter, target, outtype):
    convert(drafter, target, tmp_path / "plain.gguf", outtype=outtype)
    convert(drafter, target, tmp_path / "out.gguf", outtype=outtype, tensor_types=[("ffn_down", "q4_k")])
    plain, mixed = read_gguf_info(tmp_path / "plain.gguf"), read_gguf_info(tmp_path / "out.gguf")
    assert dict(mixed.metadata) == dict(plain.metadata)
    for tensor in plain.tensors:
        other = mixed.tensor(tensor.name)
        assert other.type_name == ("Q4_K" if "ffn_down" in tensor.name else tensor.type_name)
        if other.type_name == tensor.type_name and tensor.type_name != "Q8_0":
            np.testing.assert_array_equal(values_of(mixed, tensor.name), values_of(plain, tensor.name))


def test_the_first_pattern_that_fits_decides(tmp_path, drafter, target):
    rules = [("blk.0", "q8_0"), ("attn_q", "q6_k")]
    convert(drafter, target, tmp_path / "out.gguf", outtype="q4_0", tensor_types=rules)
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.1.attn_q.weight"] == "Q6_K"


@pytest.mark.parametrize("outtype", ["bf16", "q4_k_m"])
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (("ffn_dwon", "q8_0"), r"pattern 'ffn_dwon' fits no tensor; the matrices are blk\.\*\.attn_conv_proj\.weight,"),
        (("attn_norm", "q8_0"), r"only fits blk\.0\.attn_norm\.weight, whose type is never changed; .* fc\.weight"),
        (("attn_conv_base", "q8_0"), "only fits blk.0.attn_conv_base"),
        (("fc", "iq2_xxs"), r"Tensor type 'iq2_xxs' needs an importance matrix"),
        (("fc", "q4_k_m"), r"Tensor type 'q4_k_m' is not known; choose one of f32, .*, q4_k,"),
        (("[", "q8_0"), r"pattern '\[' fits no tensor"),
        (("(" * 900, "q8_0"), r"pattern '\(+' fits no tensor"),
        (("a{99999999999}", "q8_0"), r"pattern 'a\{9+\}' fits no tensor"),
        (("(" * 5000, "q8_0"), r"pattern '\({20}'\.\.\. has 5000 characters; shorten it to 1000 at most\.$"),
    ],
)
def test_a_tensor_type_that_cannot_be_is_one_sentence_before_anything_is_written(
    tmp_path, drafter, target, outtype, rule, says
):
    with pytest.raises(OutputError, match=says):
        convert(drafter, target, tmp_path / "out.gguf", outtype=outtype, tensor_types=[rule])
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_type_that_earlier_ones_leave_nothing_is_refused_unless_it_says_the_same(tmp_path, drafter, target):
    rules = [("ffn", "q8_0"), ("ffn_(down|up)", "f16")]
    message = r"type ffn_\(down\|up\)=f16 changes nothing: .* another type \(blk\.0\.ffn_\w+\.weight is Q8_0\); put the"
    with pytest.raises(OutputError, match=message):
        convert(drafter, target, tmp_path / "out.gguf", tensor_types=rules)
    convert(drafter, target, tmp_path / "out.gguf", tensor_types=[*reversed(rules), ("ffn_gate", "q8_0")])
    types = types_of(tmp_path / "out.gguf")
    assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_gate.weight"]) == ("F16", "Q8_0")


def test_a_type_that_the_rows_do_not_hold_is_refused_with_those_that_fit(tmp_path, target):
    drafter = make_wide_drafter(tmp_path / "drafter", dflash_config={"selector_rank": 64})
    message = (
        r"^Tensor 'selector_predecessor\.weight' has rows of 64 values, which do not hold the blocks of 256 of Q6_K;"
        r" choose one of f32, f16, bf16, q8_0, q5_1, q5_0, iq4_nl, q4_1, q4_0\.$"
    )
    with pytest.raises(OutputError, match=message):
        convert(drafter, target, tmp_path / "out.gguf", outtype="q4_k_m", tensor_types=[("selector_pre", "q6_k")])


@pytest.mark.parametrize(
    ("outtype", "rank", "stored", "says"),
    [
        ("q4_k_s", 64, "Q5_0", "do not hold Q4_K's blocks of 256: Q5_0 for "),
        ("q6_k", 128, "Q8_0", "do not hold Q6_K's blocks of 256: Q8_0 for "),
        ("iq3_s", 64, "Q5_0", "do not hold IQ3_S's blocks of 256: Q5_0 for "),
        ("iq4_xs", 64, "Q8_0", "do not hold IQ4_XS's blocks of 256: Q8_0 for "),
        ("iq4_nl", 40, "F16", "do not hold IQ4_NL's blocks of 32: F16 for "),
        ("q2_k", 64, "Q5_0", "do not hold Q2_K's blocks of 256: Q5_0 for "),
        ("q4_0", 40, "F16", "do not hold Q4_0's blocks of 32: F16 for "),
        ("q8_0", 40, "F16", "do not hold Q8_0's blocks of 32: F16 for "),
    ],
)
def test_what_codebooks_of_another_rank_became_is_said(tmp_path, target, outtype, rank, stored, says):
    drafter = make_wide_drafter(tmp_path / "drafter", dflash_config={"selector_rank": rank})
    done = convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    types = types_of(tmp_path / "out.gguf")
    assert types["selector_predecessor.weight"] == types["selector_successor.weight"] == stored
    assert [says in note for note in done.notes] == [True]
    assert done.notes[0].endswith(f"{stored} for selector_predecessor.weight, selector_successor.weight.")


@pytest.mark.parametrize(("outtype", "few"), [("q2_k", "Q2_K"), ("q3_k_s", "Q3_K"), ("iq3_s", "IQ3_S")])
def test_files_of_few_bits_spare_what_few_bits_harm_most(tmp_path, drafter, target, outtype, few):
    convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    types = types_of(tmp_path / "out.gguf")
    tender = {"fc.weight", "selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight"}
    tender |= {f"blk.{layer}.{part}_conv_proj.weight" for layer in (0, 1) for part in ("attn", "ffn")}
    assert {types[name] for name in tender} == {"Q4_K"}
    assert types["blk.0.attn_q.weight"] == types["blk.1.ffn_gate.weight"] == few
    convert(drafter, target, tmp_path / "out.gguf", outtype=outtype, tensor_types=[("fc|selector", few)])
    types = types_of(tmp_path / "out.gguf")
    assert types["fc.weight"] == types["selector_predecessor.weight"] == few
    assert types["blk.0.attn_conv_proj.weight"] == "Q4_K"


@pytest.mark.parametrize(("rank", "stored"), [(64, "Q8_0"), (256, "IQ4_NL")])
def test_short_codebook_rows_get_no_type_that_cuda_cannot_look_up(tmp_path, target, rank, stored):
    drafter = make_wide_drafter(tmp_path / "drafter", dflash_config={"selector_rank": rank})
    convert(drafter, target, tmp_path / "out.gguf", outtype="iq4_nl", tensor_types=[("selector_pre", "q4_0")])
    types = types_of(tmp_path / "out.gguf")
    assert (types["selector_predecessor.weight"], types["selector_successor.weight"]) == ("Q4_0", stored)


def test_values_that_are_computed_go_through_the_quantiser_too(tmp_path, target):
    """Query and key rows put into llama.cpp's order have no bytes in the checkpoint that could be copied."""
    drafter = make_wide_drafter(tmp_path / "drafter", rope_is_neox_style=False)
    convert(drafter, target, tmp_path / "exact.gguf", outtype="f32")
    convert(drafter, target, tmp_path / "out.gguf", outtype="q5_k_s")
    before, after = (
        values_of(read_gguf_info(tmp_path / name), "blk.1.attn_q.weight") for name in ("exact.gguf", "out.gguf")
    )
    assert np.sqrt(((after - before) ** 2).mean()) <= ERROR["Q5_K"] * np.sqrt((before**2).mean())


def test_progress_rises_to_the_whole(tmp_path, drafter, target):
    seen = []
    convert(drafter, target, tmp_path / "out.gguf", outtype="q4_k_m", progress=lambda *now: seen.append(now))
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    assert len({done for done, _ in seen}) > 10


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_an_error_in_any_phase_leaves_the_old_file_and_nothing_else(tmp_path, drafter, target, share):
    output = tmp_path / "out.gguf"
    output.write_bytes(b"what was here before")

    def interrupt(done: int, total: int) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(drafter, target, output, outtype="q4_k_m", progress=interrupt)
    assert output.read_bytes() == b"what was here before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_values_beyond_what_blocks_hold_are_refused_with_the_tensor_of_the_checkpoint(tmp_path, target):
    drafter = wide_drafter_with(tmp_path / "drafter", "layers.1.mlp.down_proj.weight", 1e6)
    message = r"model\.safetensors: tensor 'layers\.1\.mlp\.down_proj\.weight' has values that a quantised type cannot"
    for outtype in ("q4_k_m", "iq3_s"):
        with pytest.raises(CheckpointError, match=message):
            convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    # Kept exact, the tensor is no obstacle.
    convert(drafter, target, tmp_path / "out.gguf", outtype="q4_k_m", tensor_types=[("blk.1.ffn_down", "bf16")])
    assert types_of(tmp_path / "out.gguf")["blk.1.ffn_down.weight"] == "BF16"


def wide_drafter_with(folder: Path, name: str, value: float) -> Path:
    """A drafter with one value of one tensor replaced, in the BF16 bytes of the file."""
    make_wide_drafter(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack_from("<Q", data)[0]
    begin = 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    data[begin : begin + 2] = (np.array([value], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    path.write_bytes(data)
    return folder


def test_text_with_a_zero_byte_survives_the_quantiser(tmp_path, drafter):
    zero = {"tokenizer.ggml.marker": ("a\0b", GGUFValueType.STRING, None)}
    target = make_target(tmp_path / "target.gguf", hidden=256, metadata=zero)
    convert(drafter, target, tmp_path / "out.gguf", outtype="q4_0")
    assert read_gguf_info(tmp_path / "out.gguf").metadata["tokenizer.ggml.marker"] == "a\0b"


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash2.converter import convert
def progress(done, total):
    if done >= total * float(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(*map(Path, sys.argv[1:4]), outtype="q4_k_m", progress=progress)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.8, 0.95, 1.0])
def test_killed_conversion_leaves_the_old_output_whole(tmp_path, drafter, target, share):
    output = tmp_path / "out.gguf"
    output.write_bytes(b"old")
    command = [sys.executable, "-c", KILLED, *map(os.fspath, (drafter, target, output)), str(share)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert output.read_bytes() == b"old"


def test_demo_sized_drafters_say_what_their_rows_became(tmp_path):
    """Rows of 64 and 96 values hold no K-quant block at all."""
    done = convert(
        make_drafter(tmp_path / "d"), make_target(tmp_path / "t.gguf"), tmp_path / "o.gguf", outtype="q4_k_m"
    )
    assert len(done.notes) == 1
    assert "Q8_0 for blk.*.attn_v.weight, blk.*.ffn_down.weight" in done.notes[0]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).parent / "dflash2-convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_converts_to_a_mixture_with_tensor_types(tmp_path, drafter, target):
    output = tmp_path / "out.gguf"
    rules = ("--tensor-type", "fc=Q8_0", "--tensor-type", r"ffn_(up|gate)=q6_k")
    done = run(drafter, "--target", target, "-o", output, "--outtype", "Q4_K_M", *rules)
    assert done.returncode == 0, done.stderr
    assert "q4_k_m" in done.stdout
    types = types_of(output)
    assert (types["fc.weight"], types["blk.0.ffn_up.weight"], types["blk.1.attn_q.weight"]) == ("Q8_0", "Q6_K", "Q4_K")


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("--outtype", "iq2_xs"), 1, "needs an importance matrix"),
        (("--tensor-type", "nothing=q8_0"), 1, "fits no tensor"),
        (("--tensor-type", "fc"), 2, "'fc' is not PATTERN=TYPE"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path, drafter, target, options, status, says):
    done = run(drafter, "--target", target, "-o", tmp_path / "out.gguf", *options)
    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_command_help_lists_every_type():
    shown = "".join(run("--help").stdout.split())
    assert all(f"{name}|" in shown for name in OUT_TYPES[:-1])
