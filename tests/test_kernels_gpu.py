"""The bodies of the CUDA and Metal kernels, run on the CPU, against float64 numpy."""

import ctypes

import numpy as np
import pytest
from kernel_libraries import cuda_library, metal_library
from kernel_reference import conv_float64, hard_rows, selector_float64


class Kernels:
    """One backend's kernel bodies: a library and the prefix of its functions."""

    def __init__(self, library: ctypes.CDLL, prefix: str):
        self.conv, self.top_k = getattr(library, f"{prefix}_conv"), getattr(library, f"{prefix}_top_k")
        self.library = library


@pytest.fixture(scope="module")
def cuda(tmp_path_factory) -> Kernels:
    return Kernels(cuda_library(tmp_path_factory.mktemp("cuda")), "cuda")


@pytest.fixture(scope="module", params=["cuda", "metal"])
def kernels(request, tmp_path_factory) -> Kernels:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return Kernels(metal_library(tmp_path_factory.mktemp("metal")), "metal")


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(a.ctypes.data) for a in arrays]


def conv(kernels: Kernels, sizes: tuple[int, ...], inputs: list[np.ndarray]) -> np.ndarray:
    out = np.full_like(inputs[0], np.nan)
    kernels.conv(*sizes, *pointers(*inputs, out))
    return out


def conv_inputs(sizes: tuple[int, ...]) -> list[np.ndarray]:
    group, n_groups, taps, block, n_blocks, _ = sizes
    random = np.random.default_rng(sizes)
    shapes = [(block * n_blocks, group * n_groups), (block * n_blocks, 2, taps, n_groups), (2, taps, group * n_groups)]
    return [random.standard_normal(s, dtype=np.float32) for s in shapes]


def random_conv_sizes(n: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(11)
    return [(*map(int, random.integers(1, (18, 20, 5, 10, 4))), i % 2) for i in range(n)]


@pytest.mark.parametrize("sizes", [(16, 320, 2, 8, 1, 1), *random_conv_sizes(24)])
def test_conv(kernels, sizes):
    inputs = conv_inputs(sizes)
    np.testing.assert_allclose(conv(kernels, sizes, inputs), conv_float64(*inputs, sizes), rtol=1e-5, atol=1e-5)


def test_conv_reads_no_row_across_a_block(kernels):
    sizes = (16, 3, 4, 5, 3, 0)
    inputs = conv_inputs(sizes)
    whole = conv(kernels, sizes, inputs)
    inputs[0][:5] = np.nan
    inputs[0][10:] = np.nan
    np.testing.assert_array_equal(conv(kernels, sizes, inputs)[5:10], whole[5:10])


def top_k(kernels: Kernels, rows: np.ndarray, k: int) -> np.ndarray:
    """Sorted columns of every row."""
    out = np.full((len(rows), k), -1, np.int32)
    kernels.top_k(*pointers(np.ascontiguousarray(rows)), rows.shape[1], len(rows), k, *pointers(out))
    return np.sort(out)


def largest(rows: np.ndarray, k: int) -> np.ndarray:
    """Sorted columns of the k largest, of equal values the first ones."""
    return np.sort(np.argsort(-rows, kind="stable")[:, :k])


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "k"),
    [(1, 248320, 16), (1, 300000, 64), (2, 8193, 64), (3, 4096, 1), (2, 4097, 7), (2, 1025, 64), (2, 12300, 33)],
)
def test_top_k(kernels, n_rows, n_cols, k):
    rows = np.random.default_rng(n_cols).standard_normal((n_rows, n_cols), dtype=np.float32)
    np.testing.assert_array_equal(top_k(kernels, rows, k), largest(rows, k))


@pytest.mark.parametrize("k", [1, 16, 64])
@pytest.mark.parametrize(
    "order", ["rising", "falling", "equal", "two values", "minus infinity", "one lane", "infinite"]
)
def test_top_k_of_hard_rows(kernels, order, k):
    n = 9000
    rising = np.arange(n, dtype=np.float32)
    # the largest of every part sit with few threads: the shared buffer fills up
    one_lane = np.where(rising % 256 < k - 1, rising + n, rising)
    row = {**hard_rows(n, last=8999), "one lane": one_lane}[order]
    rows = np.stack([row, -row])
    np.testing.assert_array_equal(top_k(kernels, rows, k), largest(rows, k))


def test_top_k_puts_nan_first_as_a_radix_sort_does(kernels):
    rows = np.random.default_rng(3).standard_normal((2, 9000), dtype=np.float32)
    rows[0, [5, 8000]] = np.nan
    rows[1, 17] = -np.float32(np.nan)
    with_order = rows.copy()
    with_order[0, [5, 8000]] = np.inf
    with_order[1, 17] = -np.inf
    np.testing.assert_array_equal(top_k(kernels, rows, 16), largest(with_order, 16))


@pytest.mark.parametrize(
    ("k", "rank", "block", "n_blocks"), [(16, 256, 8, 1), (16, 256, 4, 3), (5, 33, 3, 2), (1, 7, 2, 1), (20, 100, 3, 1)]
)
def test_selector_scores(cuda, k, rank, block, n_blocks):
    random = np.random.default_rng(k)
    vectors = [random.standard_normal((n_blocks, block, k, rank), dtype=np.float32) for _ in range(2)]
    gate = random.standard_normal((n_blocks, block, rank), dtype=np.float32)
    unary = random.standard_normal((n_blocks, block, k), dtype=np.float32)
    ids = random.integers(0, 248320, (n_blocks, block, k), dtype=np.int32)
    lattice = np.full((n_blocks, block - 1, k + k * k), np.nan, np.float32)
    cuda.library.cuda_selector(k, rank, block, n_blocks, *pointers(*vectors, gate, unary, ids, lattice))
    np.testing.assert_allclose(lattice, selector_float64(*vectors, gate, unary, ids), rtol=1e-4, atol=1e-4)
