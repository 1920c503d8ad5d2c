"""The CPU kernels of the patches against the ops of the installed llama.cpp and against numpy."""

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64

import numpy as np
import pytest
from kernel_libraries import cpu_library
from kernel_reference import conv_float64, hard_rows, selector_float64

APART, AT_X, INTO_X, OVER_DELTA = range(4)
# group, n_groups, taps, block, n_blocks, side
SHAPES = [
    (16, 320, 2, 8, 1, 0),
    (16, 320, 2, 8, 1, 1),
    (16, 4, 2, 16, 3, 1),
    (16, 3, 4, 5, 2, 0),
    (7, 5, 3, 6, 2, 1),
    (1, 33, 2, 3, 4, 0),
    (300, 2, 4, 4, 1, 1),
    (5, 1, 1, 8, 2, 0),
    (16, 6, 2, 1, 3, 1),
    (8, 9, 4, 2, 3, 0),
]


class ConvShape(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("group", "n_groups", "taps", "block", "n_blocks", "side")]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return cpu_library(tmp_path_factory.mktemp("kernels"))


def conv_inputs(shape: ConvShape, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    rows, width = shape.block * shape.n_blocks, shape.group * shape.n_groups
    shapes = [(rows, width), (rows, 2, shape.taps, shape.n_groups), (2, shape.taps, width)]
    return [random.standard_normal(s, dtype=np.float32) for s in shapes]


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(a.ctypes.data) for a in arrays]


def fused_conv(library: ctypes.CDLL, shape: ConvShape, inputs: list[np.ndarray], n_threads: int, place: int = APART):
    out = np.empty_like(inputs[0])
    return library.fused_conv(shape, n_threads, place, *pointers(*inputs, out)), out


@pytest.mark.parametrize("sizes", SHAPES)
def test_conv_is_bit_equal_to_the_stock_chain(library, sizes):
    shape = ConvShape(*sizes)
    inputs = conv_inputs(shape, seed=1)
    stock, lean = np.empty_like(inputs[0]), np.empty_like(inputs[0])
    library.graph_conv(shape, 0, *pointers(*inputs, stock))
    library.graph_conv(shape, 1, *pointers(*inputs, lean))
    np.testing.assert_array_equal(lean, stock)
    for n_threads in (1, 3):
        done, out = fused_conv(library, shape, inputs, n_threads)
        assert done > 0
        np.testing.assert_array_equal(out, stock)
    np.testing.assert_allclose(stock, conv_float64(*inputs, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SHAPES)
def test_conv_may_write_over_its_input(library, sizes):
    shape = ConvShape(*sizes)
    inputs = conv_inputs(shape, seed=2)
    _, apart = fused_conv(library, shape, inputs, 2)
    done, out = fused_conv(library, shape, inputs, 2, AT_X)
    assert done > 0
    np.testing.assert_array_equal(out, apart)


@pytest.mark.parametrize("place", [INTO_X, OVER_DELTA])
def test_conv_leaves_overlapping_buffers_to_the_ops(library, place):
    shape = ConvShape(16, 4, 2, 8, 1, 0)
    done, _ = fused_conv(library, shape, conv_inputs(shape, seed=3), 2, place)
    assert done == 0


def test_conv_reads_no_row_across_a_block(library):
    shape = ConvShape(16, 4, 4, 5, 3, 0)
    inputs = conv_inputs(shape, seed=4)
    _, whole = fused_conv(library, shape, inputs, 2)
    inputs[0][:5] = np.nan
    inputs[0][10:] = np.nan
    _, out = fused_conv(library, shape, inputs, 2)
    np.testing.assert_array_equal(out[5:10], whole[5:10])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(0, True, id="nothing"),
        pytest.param(1, False, id="an inner result is asked for"),
        pytest.param(2, False, id="an inner result has another reader"),
        pytest.param(3, False, id="the second tap reads another tensor"),
        pytest.param(4, False, id="the second tap is not shifted"),
        pytest.param(5, False, id="half precision base"),
    ],
)
def test_conv_pattern_is_found_only_as_it_is_written(library, change, found):
    assert bool(library.matches_changed(ConvShape(16, 4, 2, 8, 1, 0), change)) is found


@pytest.mark.parametrize(
    ("k", "rank", "block", "n_blocks"), [(16, 256, 8, 1), (16, 64, 4, 3), (5, 33, 3, 2), (2, 7, 2, 1)]
)
@pytest.mark.parametrize("change", [0, 1, 2])
def test_selector_match_says_where_everything_is(library, k, rank, block, n_blocks, change):
    random = np.random.default_rng(k)
    vectors = [random.standard_normal((n_blocks, block, k, rank), dtype=np.float32) for _ in range(2)]
    gate = random.standard_normal((n_blocks, block, rank), dtype=np.float32)
    unary = random.standard_normal((n_blocks, block, k), dtype=np.float32)
    ids = random.integers(0, 248320, (n_blocks, block, k), dtype=np.int32)
    by_graph, by_match = (np.full((n_blocks, block - 1, k + k * k), np.nan, np.float32) for _ in range(2))
    found = library.selector_by_match(
        k, rank, block, n_blocks, change, *pointers(*vectors, gate, unary, ids, by_graph, by_match)
    )
    if change == 1:
        assert not found
        return
    assert found > 0
    np.testing.assert_allclose(by_match, by_graph, rtol=1e-3, atol=1e-3)
    expected = selector_float64(*vectors, gate, unary, ids)
    if change == 2:
        expected[..., :k] = ids[:, :-1]
    np.testing.assert_allclose(by_match, expected, rtol=1e-3, atol=1e-3)


def top_k(run: Callable[..., int], rows: np.ndarray, k: int, *threads: int) -> np.ndarray:
    out = np.empty((len(rows), k), np.int32)
    rows = np.ascontiguousarray(rows)
    done = run(
        *pointers(rows), c_int64(rows.shape[1]), c_int64(len(rows)), c_int(k), *map(c_int, threads), *pointers(out)
    )
    assert done or not threads
    return out


def assert_same_values(rows: np.ndarray, found: np.ndarray, expected: np.ndarray) -> None:
    """The same values in any order, at distinct columns: equal values may sit at other ones."""
    for row, a, b in zip(rows, found, expected, strict=True):
        assert len(set(a)) == len(a)
        np.testing.assert_array_equal(np.sort(row[a]), np.sort(row[b]))


def distinct(n_rows: int, n_cols: int) -> np.ndarray:
    random = np.random.default_rng(n_cols)
    return np.stack([random.permutation(n_cols).astype(np.float32) for _ in range(n_rows)])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("n_rows", "n_cols", "k"), [(8, 248320, 16), (1, 151936, 64), (3, 1024, 1), (5, 4099, 7), (2, 9001, 64)]
)
def test_top_k_finds_the_columns_that_the_stock_op_finds(library, n_rows, n_cols, k, n_threads):
    rows = distinct(n_rows, n_cols)
    found = top_k(library.fused_top_k, rows, k, n_threads)
    expected = top_k(library.graph_top_k, rows, k)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    np.testing.assert_array_equal(np.sort(found), np.sort(np.argsort(-rows)[:, :k]))


@pytest.mark.parametrize(
    "order", ["rising", "falling", "equal", "two values", "minus infinity", "signed zeros", "infinite"]
)
@pytest.mark.parametrize("n_threads", [1, 6])
def test_top_k_of_hard_rows(library, order, n_threads):
    n = 5003
    signs = np.where(np.arange(n) % 2 == 0, np.float32(0), np.float32(-0.0))
    row = {**hard_rows(n, last=4000), "signed zeros": signs}[order]
    rows = np.stack([row, row])
    found = top_k(library.fused_top_k, rows, 16, n_threads)
    assert_same_values(rows, found, top_k(library.graph_top_k, rows, 16))
    assert_same_values(rows, found, np.argsort(-rows, kind="stable")[:, :16])


@pytest.mark.parametrize("n_threads", [1, 6])
@pytest.mark.parametrize("column", [0, 5, 1500, 4998])
def test_top_k_of_rows_with_a_nan_is_the_stock_answer(library, column, n_threads):
    rows = distinct(2, 5003)
    rows[1, column] = np.nan
    np.testing.assert_array_equal(
        top_k(library.fused_top_k, rows, 16, n_threads)[1], top_k(library.graph_top_k, rows, 16)[1]
    )


@pytest.mark.parametrize(("n_cols", "k"), [(1023, 4), (4096, 65)])
def test_top_k_leaves_narrow_rows_and_large_k_to_the_stock_op(library, n_cols, k):
    rows, out = distinct(2, n_cols), np.empty((2, k), np.int32)
    assert not library.fused_top_k(*pointers(rows), c_int64(n_cols), c_int64(2), k, 2, *pointers(out))
    assert (out == -1).all()


def test_each_kernel_counts_its_runs(library):
    for name in ("conv", "top_k"):
        getattr(library, f"ggml_cpu_dflash2_{name}_count").restype = ctypes.c_uint64
    before = library.ggml_cpu_dflash2_conv_count(), library.ggml_cpu_dflash2_top_k_count()
    shape = ConvShape(16, 4, 2, 8, 1, 0)
    fused_conv(library, shape, conv_inputs(shape, seed=5), 3)
    fused_conv(library, shape, conv_inputs(shape, seed=5), 3, OVER_DELTA)
    top_k(library.fused_top_k, distinct(2, 2048), 16, 3)
    after = library.ggml_cpu_dflash2_conv_count(), library.ggml_cpu_dflash2_top_k_count()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)
