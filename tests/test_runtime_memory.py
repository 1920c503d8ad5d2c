"""The drafter's memory: no more than its window needs, of the types asked for, where it was asked for."""

import re

import pytest
from factories_targets import BLOCK, HEAD_DIM, KV_HEADS, WINDOW, make_kind, random_drafter

from dflash2 import DFlashLlama, native
from dflash2.converter import convert
from dflash2.native.log import captured_log
from dflash2.runtime.checks import KV_TYPES
from dflash2.runtime.injection import drafter_rows

EXACT = {"n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
LAYERS = 2  # of the drafter
_BUFFER = re.compile(r"(KV|compute) buffer size =\s+([\d.]+) MiB")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_kind(tmp_path_factory.mktemp("target") / "llama.gguf", "llama")


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """Path of a drafter with the given kinds of layers."""
    folder = tmp_path_factory.mktemp("drafter")

    def make(*layers):
        path = folder / f"{'-'.join(layers)}.gguf"
        if not path.exists():
            kinds = [f"{layer}_attention" for layer in layers]
            convert(random_drafter(folder / path.stem, layer_types=kinds), target, path, outtype="f32")
        return path

    return make


def buffers(target, drafter, **options):
    """MiB of (KV, compute) buffers of the drafter, as llama.cpp logs them: those it adds after the target's."""
    lines = []
    with captured_log(lambda _, text: lines.append(text)):
        DFlashLlama(target, drafter, **{**EXACT, **options}).close()
    created = "".join(lines).split("constructing llama_context")[2]
    found = _BUFFER.findall(created)
    return tuple(sum(float(size) for kind, size in found if kind == wanted) for wanted in ("KV", "compute"))


def kv_mib(cells, layers, bytes_per_value=2):
    return 2 * layers * cells * KV_HEADS * HEAD_DIM * bytes_per_value / 2**20


def test_a_windowed_drafter_holds_its_window_whatever_the_context(target, drafter):
    path = drafter("sliding", "sliding")
    sizes = {n_ctx: buffers(target, path, n_ctx=n_ctx)[0] for n_ctx in (1024, 16384)}
    assert sizes[16384] == sizes[1024] <= kv_mib(256, LAYERS) + 0.01  # 32 positions and 64 rows, in steps of 256 cells
    assert WINDOW + 64 <= 256


def test_layers_that_see_everything_hold_everything_and_only_they(target, drafter):
    mixed, full = (
        buffers(target, drafter(*kinds), n_ctx=16384)[0] for kinds in (("sliding", "full"), ("full", "full"))
    )
    assert full == pytest.approx(kv_mib(16384, 2), abs=0.01)
    assert mixed == pytest.approx(kv_mib(16384, 1) + kv_mib(256, 1), abs=0.02)


@pytest.mark.parametrize("name", ["f32", "q8_0", "q4_0"])
def test_the_drafters_cache_is_of_the_type_asked_for(target, drafter, name):
    bits = {"f32": 32, "q8_0": 8.5, "q4_0": 4.5}[name]
    kind = KV_TYPES[name]
    size, _ = buffers(target, drafter("full", "full"), n_ctx=16384, type_k_draft=kind, type_v_draft=kind)
    assert size == pytest.approx(kv_mib(16384, 2, bits / 8), abs=0.02)


def test_the_drafters_cache_is_of_the_targets_type_by_default(target, drafter):
    size, _ = buffers(target, drafter("full", "full"), n_ctx=16384, type_k=8, type_v=8)
    assert size == pytest.approx(kv_mib(16384, 2, 8.5 / 8), abs=0.02)


def test_the_drafters_compute_buffer_does_not_grow_with_the_targets_batch(target, drafter):
    small, large = (
        buffers(target, drafter("sliding", "sliding"), n_ctx=16384, n_batch=n, n_ubatch=n)[1] for n in (64, 2048)
    )
    assert small == large < 2.0


@pytest.mark.parametrize(
    ("block", "vocabulary", "rows"), [(8, 248_320, 33), (16, 32_000, 64), (8, 288, 64), (40, 1_000_000, 40)]
)
def test_rows_of_a_drafters_batch_keep_its_logits_small(block, vocabulary, rows):
    assert drafter_rows(block, vocabulary) == rows
    assert rows == block or rows * vocabulary * 4 <= 32 << 20


@pytest.mark.parametrize("kinds", [("sliding", "sliding"), ("full", "full"), ("sliding", "full")])
def test_only_the_last_window_of_a_prompt_is_injected_if_nothing_else_is_read(target, drafter, kinds):
    llama = DFlashLlama(target, drafter(*kinds), n_ctx=1024, depth=None, **EXACT)
    injected = []
    decode = llama._session.drafter.decode_features
    llama._session.drafter.decode_features = lambda rows, start: (
        injected.append((start, len(rows))),
        decode(rows, start),
    )
    llama.eval(list(range(20, 220)) * 3)
    llama.close()
    assert injected[0][0] == (600 - 4 - WINDOW if kinds == ("sliding", "sliding") else 0)
    assert injected[0][0] + sum(rows for _, rows in injected) == 600


def test_a_window_injected_alone_gives_the_proposals_of_everything_injected(target, drafter):
    proposals = {}
    for window in (True, False):
        llama = DFlashLlama(target, drafter("sliding", "sliding"), n_ctx=1024, depth=None, auto_disable=False, **EXACT)
        if not window:
            llama._session._begin_injection = lambda start, end: start  # noqa: ARG005
        records = []
        llama.on_cycle = records.append
        for _ in zip(range(30), llama.generate(list(range(20, 220)), temp=0.0), strict=False):
            pass
        llama.close()
        proposals[window] = [record.proposal for record in records]
    assert proposals[True] == proposals[False]
    assert len(proposals[True]) > 5


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0"])
def test_acceptance_hardly_depends_on_the_type_of_the_drafters_cache(target_path, drafter_gguf, prompts, name):
    accepted = {}
    for kind in ("f32", name):
        llama = DFlashLlama(
            target_path,
            drafter_gguf,
            n_ctx=512,
            depth=None,
            auto_disable=False,
            type_k_draft=KV_TYPES[kind],
            type_v_draft=KV_TYPES[kind],
            **EXACT,
        )
        for prompt in prompts[:4]:
            for _ in zip(range(120), llama.generate(llama.tokenize(prompt.encode()), temp=0.0), strict=False):
                pass
        accepted[kind] = llama.stats.accepted_length
        llama.close()
    assert accepted[name] == pytest.approx(accepted["f32"], rel=0.05)
    assert accepted["f32"] > 2


def test_devices_are_named_by_the_library():
    assert "CPU" in native.device_names()
    assert set(native.gpu_names()) < set(native.device_names())
    assert BLOCK == 8
