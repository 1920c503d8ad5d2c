"""Dequantised weights equal, bit for bit, what the libraries that define the formats make of the same files."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from types import SimpleNamespace  # noqa: E402

import numpy as np  # noqa: E402
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402
from factories import drafter_config, drafter_tensors, make_target  # noqa: E402
from factories_quantized import (  # noqa: E402
    MODULE,
    MX_FORMATS,
    all_rows,
    compress,
    decompress,
    open_parts,
    pack,
    quantization_config,
    random_weight,
    same_bits,
    weight_scheme,
)
from gguf import GGUFReader  # noqa: E402
from gguf.quants import dequantize as dequantize_gguf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize  # noqa: E402

from dflash2.converter import convert  # noqa: E402
from dflash2.converter.quantized import codes  # noqa: E402
from dflash2.converter.sources import Stored  # noqa: E402

INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
FLOAT4 = {"num_bits": 4, "type": "float"}
TENSOR, CHANNEL = {"strategy": "tensor"}, {"strategy": "channel"}
ASYMMETRIC = {"symmetric": False}


def group(size):
    return {"strategy": "group", "group_size": size}


def block(rows, columns):
    return {"strategy": "block", "block_structure": [rows, columns]}


# (format, weights, shape): odd sizes, sizes that do not fill a 32-bit word, and edges that cut a block.
CASES = [
    ("pack-quantized", INT4 | group(32), (33, 96)),
    ("pack-quantized", INT4 | group(128), (17, 256)),
    ("pack-quantized", INT4 | group(5), (9, 35)),
    ("pack-quantized", INT4 | CHANNEL, (21, 83)),
    ("pack-quantized", INT4 | TENSOR, (7, 31)),
    ("pack-quantized", INT4 | group(32) | ASYMMETRIC, (33, 96)),
    ("pack-quantized", INT4 | group(3) | ASYMMETRIC, (13, 27)),
    ("pack-quantized", INT4 | CHANNEL | ASYMMETRIC, (19, 44)),
    ("pack-quantized", INT4 | TENSOR | ASYMMETRIC, (19, 44)),
    ("pack-quantized", INT8 | group(32), (10, 64)),
    ("pack-quantized", INT8 | CHANNEL, (11, 37)),
    ("pack-quantized", INT8 | group(16) | ASYMMETRIC, (11, 48)),
    ("pack-quantized", INT8 | CHANNEL | ASYMMETRIC, (11, 37)),
    ("int-quantized", INT8 | CHANNEL, (11, 37)),
    ("int-quantized", INT8 | TENSOR, (11, 37)),
    ("int-quantized", INT8 | group(8), (11, 40)),
    ("int-quantized", INT8 | CHANNEL | ASYMMETRIC, (11, 37)),
    ("int-quantized", INT8 | TENSOR | ASYMMETRIC, (11, 37)),
    ("naive-quantized", INT8 | CHANNEL, (12, 20)),
    ("naive-quantized", FLOAT8 | CHANNEL, (12, 20)),
    ("float-quantized", FLOAT8 | CHANNEL, (11, 37)),
    ("float-quantized", FLOAT8 | TENSOR, (11, 37)),
    ("float-quantized", FLOAT8 | group(16), (11, 48)),
    ("float-quantized", FLOAT8 | block(8, 16), (24, 48)),
    ("float-quantized", FLOAT8 | block(8, 16), (21, 43)),
    ("float-quantized", FLOAT8 | block(128, 128), (130, 150)),
    ("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}, (9, 80)),
    ("mxfp4-pack-quantized", FLOAT4 | group(32) | {"scale_dtype": torch.uint8}, (9, 96)),
    ("mxfp8-quantized", FLOAT8 | group(32) | {"scale_dtype": torch.uint8}, (9, 96)),
]
NAMES = [f"{form}-{weights['type']}{weights['num_bits']}-{weights['strategy']}-{index}"
         for index, (form, weights, _) in enumerate(CASES)]  # fmt: skip
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def in_f32(state, scheme):
    """The library's result with every scale widened to F32, so that nothing is rounded to a shorter type."""
    if scheme.format.startswith(("nvfp4", "mxfp4")):
        from compressed_tensors.compressors.mx_utils import decompress_mx_scale
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        packed, scale = state["weight_packed"], state["weight_scale"]
        scale = decompress_mx_scale(scale) if scheme.format in MX_FORMATS else scale
        unpacked = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
        return dequantize(
            unpacked, scale.float(), args=scheme.weights, global_scale=state.get("weight_global_scale")
        )  # fmt: skip
    if scheme.format in MX_FORMATS:
        return decompress(state, scheme).float()
    return decompress(state | {"weight_scale": state["weight_scale"].float()}, scheme)


@pytest.mark.parametrize("dtype", FLOATS, ids=["F32", "BF16", "F16"])
@pytest.mark.parametrize(("form", "weights", "shape"), CASES, ids=NAMES)
def test_rows_equal_those_of_compressed_tensors(tmp_path, form, weights, shape, dtype):
    scheme = weight_scheme(form, **weights)
    state = compress(random_weight(shape, dtype), scheme)
    sources, notes = open_parts(tmp_path, {"quantization_config": quantization_config(scheme)}, state)
    source = sources[f"{MODULE}.weight"]
    assert source.shape == shape
    ours = all_rows(source)
    assert same_bits(ours, decompress(state, scheme))
    assert same_bits(ours, in_f32(state, scheme))
    for step in (1, 3, 8):
        assert same_bits(all_rows(source, step), ours)
    assert notes == ("1 weights dequantised (compressed-tensors).",)


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_in_activation_order_take_the_scale_of_their_group(tmp_path, bits):
    """Columns quantised as neighbours, then put in another order, with the group of each beside them."""
    scheme = weight_scheme("pack-quantized", num_bits=bits, type="int", **group(8))
    state = compress(random_weight((6, 40)), scheme)
    values = decompress(state, scheme)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    integers = torch.round(values / state["weight_scale"].repeat_interleave(8, dim=1))
    state = pack(integers[:, order], scheme) | {
        "weight_scale": state["weight_scale"],
        "weight_g_idx": (order // 8).to(torch.int32),
    }
    config = quantization_config(scheme)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state)
    ours = all_rows(sources[f"{MODULE}.weight"])
    assert same_bits(ours + 0.0, values[:, order] + 0.0)


def test_group_indices_of_minus_one_mean_neighbouring_columns(tmp_path):
    scheme = weight_scheme("pack-quantized", **INT4, **group(8))
    state = compress(random_weight((6, 40)), scheme)
    expected = decompress(state, scheme)
    state["weight_g_idx"] = torch.full((40,), -1, dtype=torch.int32)
    sources, _ = open_parts(tmp_path, {"quantization_config": quantization_config(scheme)}, state)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), expected)


# --- quant_method fp8


def fp8_library(block_size, scale_format="float"):
    config = SimpleNamespace(weight_block_size=block_size, scale_fmt=scale_format)
    return SimpleNamespace(quantization_config=config)


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
@pytest.mark.parametrize(("shape", "size"), [((256, 384), (128, 128)), ((24, 48), (8, 16)), ((24, 48), None)])
def test_fp8_blocks_equal_those_of_transformers(tmp_path, shape, size, scale_format):
    library = fp8_library(size, scale_format)
    state = Fp8Quantize(library)._quantize_one("weight", random_weight(shape))
    expected = Fp8Dequantize(library)._dequantize_one(state["weight"], state["weight_scale_inv"], torch.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size and list(size)}
    if size is None:
        state["weight_scale_inv"] = state["weight_scale_inv"].reshape(())
    sources, _ = open_parts(tmp_path, {"quantization_config": config | {"scale_fmt": scale_format}}, state)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"], step=10), expected)


@pytest.mark.parametrize("shape", [(130, 150), (128, 129), (1, 7), (300, 512), (160, 320)])
def test_fp8_blocks_at_the_edges_are_cut(tmp_path, shape):
    """As compressed-tensors reads such files; transformers refuses them, or takes smaller blocks where sizes allow."""
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    random = torch.Generator().manual_seed(0)
    state = {
        "weight": random_weight(shape).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(grid, generator=random) + 0.1,
    }
    library = FP8BlockDequantizer(dtype=torch.float32)
    expected = library._create_dequantized_weight(state["weight"], state["weight_scale_inv"])
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"], step=7), expected)


def test_fp8_without_a_block_size_goes_by_the_shape_of_the_scale(tmp_path):
    weight = random_weight((130, 150)).to(torch.float8_e4m3fn)
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    state = {"weight": weight, "weight_scale": torch.tensor(0.3), "input_scale": torch.tensor(2.0)}
    sources, notes = open_parts(tmp_path / "tensor", config, state)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), weight.float() * 0.3)
    assert notes[1] == "input_scale left out: scales of activations or of the cache, not of weights."
    state = {"weight": weight, "weight_scale_inv": torch.tensor([[0.3, 0.5], [0.7, 0.9]])}
    sources, _ = open_parts(tmp_path / "block", config, state)
    factors = state["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :150]
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), weight.float() * factors)


# --- modelopt


@pytest.fixture(scope="module")
def qtensor():
    return pytest.importorskip("modelopt.torch.quantization.qtensor")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(9, 80), (32, 64), (2, 16)])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=["F32", "BF16"])
def test_nvfp4_equals_modelopt(tmp_path, qtensor, shape, dtype):
    quantised, scale, scale_2 = qtensor.NVFP4QTensor.quantize(random_weight(shape, dtype), 16)
    state = {"weight": quantised._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    expected = quantised.dequantize(dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state)
    ours = all_rows(sources[f"{MODULE}.weight"], step=4)
    assert same_bits(ours, expected)
    assert (quantised._quantized_data & 15 == 8).any()  # a code of minus zero is read, too


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("algorithm", "axis"), [("FP8", None), ("FP8_PER_CHANNEL_PER_TOKEN", 0)])
def test_fp8_equals_modelopt(tmp_path, qtensor, algorithm, axis):
    weight = random_weight((9, 37))
    weight[weight.shape[0] // 2] = 0.01  # the library divides by a row's largest value
    quantised, scale = qtensor.FP8QTensor.quantize(weight, axis=axis)
    expected = quantised.dequantize(dtype=torch.float32, scale=scale)
    state = {"weight": quantised._quantized_data, "weight_scale": scale.squeeze()}
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), expected)


def test_mixed_precision_of_modelopt_goes_by_layer(tmp_path):
    weight = random_weight((4, 16)).to(torch.float8_e4m3fn)
    layers = {MODULE: {"quant_algo": "FP8"}, "layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    other = {
        "layers.0.mlp.up_proj.weight": torch.tensor([[0x10] + [0x72] * 7], dtype=torch.uint8),
        "layers.0.mlp.up_proj.weight_scale": torch.ones(1, 1).to(torch.float8_e4m3fn),
        "layers.0.mlp.up_proj.weight_scale_2": torch.tensor(1.0),
    }
    parts = {"weight": weight, "weight_scale": torch.tensor(0.5)}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, parts, other)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), weight.float() * 0.5)
    assert all_rows(sources["layers.0.mlp.up_proj.weight"]).tolist() == [[0, 0.5] + [1, 6] * 7]


# --- tables


def test_e4m3_table_is_that_of_torch():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(codes.E4M3.values), ~numbers)
    assert np.array_equal(codes.E4M3.values[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_e8m0_table_is_that_of_torch(dtype):
    data = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(data).view(torch.float8_e8m0fnu).float().numpy()
    ours = codes.SCALES[dtype](data)
    assert np.array_equal(ours[:255].view(np.uint32), expected[:255].view(np.uint32))
    assert np.isnan(ours[255])
    assert ours[0] == 2.0**-127


# --- the rest of the checkpoint


def test_tensors_that_are_not_quantised_stay_as_they_are(tmp_path):
    scheme = weight_scheme("pack-quantized", **INT4, **group(8))
    extra = {"norm.weight": torch.ones(16, dtype=torch.bfloat16), "d2t": torch.zeros(4, dtype=torch.int64)}
    extra["layers.0.self_attn.k_scale"] = torch.tensor(1.0)
    config = {"quantization_config": quantization_config(scheme)}
    sources, notes = open_parts(tmp_path, config, compress(random_weight((8, 16)), scheme), extra)
    assert set(sources) == {f"{MODULE}.weight", "norm.weight", "d2t"}
    assert isinstance(sources["norm.weight"], Stored)
    assert isinstance(sources["d2t"], Stored)
    assert notes == (
        "1 weights dequantised (compressed-tensors).",
        "k_scale left out: scales of activations or of the cache, not of weights.",
    )


def test_a_checkpoint_without_a_description_is_passed_on(tmp_path):
    sources, notes = open_parts(tmp_path, {}, {"weight": torch.ones(2, 3)})
    assert isinstance(sources[f"{MODULE}.weight"], Stored)
    assert notes == ()


def test_embeddings_and_linear_layers_go_by_the_group_of_their_class(tmp_path):
    linear = weight_scheme("int-quantized", **INT8, **CHANNEL)
    config = quantization_config(linear)
    embedding = weight_scheme("int-quantized", **INT8, **CHANNEL, **ASYMMETRIC)
    config["config_groups"]["group_1"] = embedding.model_dump(mode="json") | {"targets": ["Embedding"]}
    state, table = compress(random_weight((5, 6)), linear), compress(random_weight((7, 6), seed=1), embedding)
    extra = {f"embed_tokens.{part}": tensor for part, tensor in table.items()}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state, extra)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), decompress(state, linear))
    assert same_bits(all_rows(sources["embed_tokens.weight"]), decompress(table, embedding))


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["Linear"], "weights": None}}])
def test_compressed_tensors_of_a_cache_alone_leaves_weights_alone(tmp_path, groups):
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": groups}
    config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    parts = {"weight": torch.ones(2, 3), "k_scale": torch.tensor(0.5)}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, parts)
    assert isinstance(sources[f"{MODULE}.weight"], Stored)


def test_modelopt_of_a_cache_alone_leaves_weights_alone(tmp_path):
    description = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(description))
    sources, notes = open_parts(tmp_path, {}, {"weight": torch.ones(2, 3), "k_scale": torch.tensor(0.5)})
    assert isinstance(sources[f"{MODULE}.weight"], Stored)
    assert notes == ("k_scale left out: scales of activations or of the cache, not of weights.",)


def test_groups_for_named_modules_go_before_groups_for_classes(tmp_path):
    int4 = weight_scheme("pack-quantized", **INT4, **group(8))
    int8 = weight_scheme("int-quantized", **INT8, **CHANNEL)
    config = quantization_config(int4, format="mixed-precision")
    config["config_groups"]["group_1"] = int8.model_dump(mode="json") | {"targets": ["re:.*up_proj$"]}
    state = compress(random_weight((8, 16)), int4)
    other = compress(random_weight((5, 6)), int8)
    extra = {f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in other.items()}
    sources, _ = open_parts(tmp_path, {"quantization_config": config}, state, extra)
    assert same_bits(all_rows(sources[f"{MODULE}.weight"]), decompress(state, int4))
    assert same_bits(all_rows(sources["model.layers.0.mlp.up_proj.weight"]), decompress(other, int8))


# --- from the checkpoint to the GGUF file

MATRICES = {
    "fc": "fc",
    "candidate_selector.hidden_projection": "selector_hidden",
    **{
        f"layers.{layer}.{module}": f"blk.{layer}.{name}"
        for layer in range(2)
        for module, name in {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "attention_conv.kernel_projection": "attn_conv_proj",
            "mlp_conv.kernel_projection": "ffn_conv_proj",
        }.items()
    },
}


def int4_checkpoint(folder, dtype):
    """A tiny DFlash 2 drafter in int4 groups of 32, and what the library makes of each matrix."""
    scheme = weight_scheme("pack-quantized", **INT4, **group(32))
    return quantised_drafter(
        folder,
        quantization_config(scheme),
        lambda weight: compress(weight.to(dtype), scheme),
        lambda state: decompress(state, scheme),
    )


def fp8_checkpoint(folder, dtype):
    """The same in FP8 blocks of 16 x 32; `dtype` is that of the library's result."""
    library = fp8_library((16, 32))
    return quantised_drafter(
        folder,
        {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["lm_head"]},
        lambda weight: Fp8Quantize(library)._quantize_one("weight", weight),
        lambda state: Fp8Dequantize(library)._dequantize_one(state["weight"], state["weight_scale_inv"], dtype),
    )


def quantised_drafter(folder, quantization, quantise, dequantise):
    config = drafter_config() | {"quantization_config": quantization}
    expected, stored = {}, {}
    for name, values in drafter_tensors(config).items():
        module = name.rpartition(".")[0]
        if module not in MATRICES:
            stored[name] = torch.from_numpy(values)
            continue
        state = quantise(torch.from_numpy(values))
        expected[f"{MATRICES[module]}.weight"] = dequantise(state)
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in state.items()}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder, expected


@pytest.mark.parametrize("outtype", ["f32", "bf16"])
@pytest.mark.parametrize("checkpoint", [int4_checkpoint, fp8_checkpoint], ids=["int4", "fp8"])
def test_a_converted_drafter_holds_what_the_library_dequantises(tmp_path, checkpoint, outtype):
    drafter, expected = checkpoint(tmp_path / "drafter", torch.float32 if outtype == "f32" else torch.bfloat16)
    output = tmp_path / "out.gguf"
    done = convert(drafter, make_target(tmp_path / "target.gguf"), output, outtype=outtype)
    assert f"{len(MATRICES)} weights dequantised" in done.notes[0]
    written = {tensor.name: tensor for tensor in GGUFReader(output).tensors}
    for name, values in expected.items():
        tensor = written[name]
        assert tensor.tensor_type.name == outtype.upper()
        ours = torch.from_numpy(dequantize_gguf(tensor.data, tensor.tensor_type).copy())
        assert same_bits(ours, values), name
