"""The quantised formats as their definitions say, in numbers worked out by hand; needs none of the libraries."""

import json

import numpy as np
import pytest
from factories_parts import Tensors, read_all

from dflash2.converter.quantized import codes


def config(format_name: str, **weights: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.int32)


def packed(word: np.ndarray, shape: tuple[int, int], scale: np.ndarray) -> Tensors:
    return {
        "weight_packed": ("I32", word),
        "weight_scale": ("F32", scale.astype(np.float32)),
        "weight_shape": ("I64", np.array(shape, np.int64)),
    }


def test_int4_words_hold_eight_columns_from_the_lowest_bits_up(tmp_path):
    """8 is zero; the tenth column is the second nibble of the second word, the rest of it is padding."""
    parts = packed(words(0x76543210, 0xFFFFFF_98).reshape(1, 2), (1, 10), np.array([[0.5]]))
    (values,) = read_all(tmp_path, config("pack-quantized", num_bits=4, strategy="channel"), parts)
    assert values.tolist() == [[-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5]]


def test_packed_zero_points_run_down_the_rows(tmp_path):
    """Two groups of two columns; nine rows, so the ninth zero point opens a second word."""
    parts = packed(words(*[0x0000AA99] * 9).reshape(9, 1), (9, 4), np.ones((9, 2)))
    zeros = words(0x76543210, 0x88888888, 0xFFFFFFF9, 0xFFFFFFFA).reshape(2, 2)
    parts["weight_zero_point"] = ("I32", zeros)
    settings = config("pack-quantized", num_bits=4, strategy="group", group_size=2, symmetric=False)
    (values,) = read_all(tmp_path, settings, parts)
    assert values[:, 0].tolist() == [9, 8, 7, 6, 5, 4, 3, 2, 0]
    assert values[:, 3].tolist() == [2] * 8 + [0]


def test_activation_order_names_the_group_of_each_column(tmp_path):
    parts = packed(words(0x99999999).reshape(1, 1), (1, 4), np.array([[2.0, 3.0]]))
    parts["weight_g_idx"] = ("I32", np.array([1, 0, 0, 1], np.int32))
    settings = config("pack-quantized", num_bits=4, strategy="group", group_size=2, actorder="group")
    assert read_all(tmp_path, settings, parts)[0].tolist() == [[3, 2, 2, 3]]


def test_fp8_blocks_start_at_the_first_row_and_column(tmp_path):
    """Blocks of 2 x 3 on a matrix of 3 x 4; 0x38 is 1."""
    parts = {
        "weight": ("F8_E4M3", np.full((3, 4), 0x38, np.uint8)),
        "weight_scale_inv": ("F32", np.array([[1, 2], [3, 4]], np.float32)),
    }
    (values,) = read_all(tmp_path, {"quant_method": "fp8", "weight_block_size": [2, 3]}, parts)
    assert values.tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]


NVFP4 = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], [0x77, 0, 0, 0, 0, 0, 0, 0xF1]], np.uint8)
# Low half first; 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; the highest bit is the sign.
NVFP4_VALUES = [
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6],
    [6, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.5, -6],
]
# 1.5 and 448 in E4M3.
NVFP4_SCALES = np.array([[0x3C], [0x7E]], np.uint8)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_nvfp4_of_modelopt_multiplies_both_scales(tmp_path, file):
    parts = {
        "weight": ("U8", NVFP4),
        "weight_scale": ("F8_E4M3", NVFP4_SCALES),
        "weight_scale_2": ("F32", np.array(0.25, np.float32)),
        "input_scale": ("F32", np.array(0.01, np.float32)),
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if file == "hf_quant_config.json":
        inner = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        description = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": inner}
        (tmp_path / file).write_text(json.dumps(description))
        quantization = None
    (values,) = read_all(tmp_path, quantization, parts)
    assert values.tolist() == (np.array(NVFP4_VALUES) * [[0.375], [112.0]]).tolist()


def test_nvfp4_of_compressed_tensors_divides_by_its_global_scale(tmp_path):
    """448 / 3, rounded to F32; the product with an inverse of 3 would be another number."""
    parts = {
        "weight_packed": ("U8", NVFP4),
        "weight_scale": ("F8_E4M3", NVFP4_SCALES),
        "weight_global_scale": ("F32", np.array([3.0], np.float32)),
    }
    settings = config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    (values,) = read_all(tmp_path, settings, parts)
    scales = np.array([[0.5], [448 / 3]], np.float32)
    assert scales[1, 0] != np.float32(448) * (np.float32(1) / np.float32(3))
    assert np.array_equal(values, np.array(NVFP4_VALUES, np.float32) * scales)


E4M3 = {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x3F: 1.875, 0x7E: 448.0, 0xFE: -448.0}


@pytest.mark.parametrize(("byte", "value"), E4M3.items())
def test_e4m3_values(byte, value):
    assert codes.E4M3.read(np.array([byte], np.uint8))[0] == value


def test_e4m3_has_no_infinity_and_two_bytes_that_are_no_number():
    values = codes.E4M3.read(np.arange(256, dtype=np.uint8))
    assert np.flatnonzero(~np.isfinite(values)).tolist() == [0x7F, 0xFF]
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.signbit(values[0x80])


@pytest.mark.parametrize(("byte", "value"), {0: 2.0**-127, 1: 2.0**-126, 127: 1.0, 128: 2.0, 254: 2.0**127}.items())
def test_e8m0_values(byte, value):
    assert codes.SCALES["F8_E8M0"](np.array([byte], np.uint8))[0] == value
