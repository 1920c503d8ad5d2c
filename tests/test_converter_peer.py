"""Upstream's own converter, from the pinned source, on the same checkpoint: same tensors, same metadata."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import drafter_config, drafter_tensors, make_drafter, make_target, write_checkpoint

from dflash2.converter import DIRECT_TYPES, convert
from dflash2.gguf_info import GGUFInfo, read_gguf_info

pytest.importorskip("torch")
pytest.importorskip("transformers")

UPSTREAM_SCRIPT = Path(__file__).with_name("upstream_convert.py")

# Keys that we write and upstream does not, and keys upstream writes and we do not, each with the reason.
ONLY_OURS = {
    "dflash.attention.causal": "upstream leaves the flag out when config.json does, and the loader then assumes false;"
    " the reference makes sliding layers causal",
    "dflash.attention.causal_swa": "the per-kind rule, which upstream has no key for",
    "dflash.attention.sliding_window": "upstream drops a window unless 'use_sliding_window' is true",
    "dflash.attention.sliding_window_pattern": "the same",
    "dflash.rope.scaling.attn_factor": "the key that the loader reads; upstream writes yarn_attn_factor, which it does"
    " not read",
}
ONLY_UPSTREAM = {
    "dflash.rope.scaling.yarn_attn_factor": "never read by the pinned llama.cpp",
    "dflash.rope.scaling.yarn_beta_fast": "never read by the pinned llama.cpp; other values than its own are refused",
    "dflash.rope.scaling.yarn_beta_slow": "the same",
}


class Upstream:
    """Upstream's converter in one process for all tests: its imports take seconds."""

    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(UPSTREAM_SCRIPT), str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def convert(self, drafter: Path, target: Path, output: Path, outtype: str) -> GGUFInfo:
        self._process.stdin.write(json.dumps([str(drafter), str(target), str(output), outtype]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"
        return read_gguf_info(output)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture(scope="module")
def upstream(llama_cpp_source: Path) -> Iterator[Upstream]:
    service = Upstream(llama_cpp_source)
    yield service
    service.close()


def tensor_digests(info: GGUFInfo) -> dict[str, tuple[str, tuple[int, ...], str]]:
    raw = info.path.read_bytes()
    return {
        tensor.name: (
            tensor.type_name,
            tensor.shape,
            hashlib.sha256(raw[tensor.offset : tensor.offset + tensor.n_bytes]).hexdigest(),
        )
        for tensor in info.tensors
    }


def typed_metadata(info: GGUFInfo) -> dict[str, tuple[object, object]]:
    """Without the record of the inputs and their hashes, which upstream does not keep."""
    keys = [key for key in info.metadata if not key.startswith("dflash2.")]
    return {key: (info.value_types[key], info.metadata[key]) for key in keys}


def assert_same_file(ours: GGUFInfo, theirs: GGUFInfo, only_ours: set[str], only_upstream: set[str]) -> None:
    assert tensor_digests(ours) == tensor_digests(theirs)
    assert only_ours <= set(ONLY_OURS) and only_upstream <= set(ONLY_UPSTREAM)
    mine, other = typed_metadata(ours), typed_metadata(theirs)
    assert mine.keys() - other.keys() == only_ours
    assert other.keys() - mine.keys() == only_upstream
    shared = mine.keys() & other.keys()
    assert {key: mine[key] for key in shared} == {key: other[key] for key in shared}


@pytest.mark.parametrize("outtype", DIRECT_TYPES)
def test_demo_drafter_converts_as_upstream_does(upstream, drafter_dir, target_path, tmp_path, outtype):
    """Type f16 too, once fc is told to be F16, which overflows for some targets (hazard 14)."""
    as_upstream = [("fc.weight", "f16")] if outtype == "f16" else []
    convert(drafter_dir, target_path, tmp_path / "ours.gguf", outtype=outtype, tensor_types=as_upstream)
    theirs = upstream.convert(drafter_dir, target_path, tmp_path / "upstream.gguf", outtype)
    assert_same_file(read_gguf_info(tmp_path / "ours.gguf"), theirs, set(), set())


# Name of the case -> (version, changes to config.json, keys only we write, keys only upstream writes).
CONFIGS = {
    "v1": (1, {}, set(), set()),
    "taps at the top level": (
        2,
        {"target_layer_ids": [1, 3], "without": ["dflash_config.target_layer_ids"]},
        set(),
        set(),
    ),
    "full attention, no flag": (
        1,
        {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "without": ["is_causal"]},
        {"dflash.attention.causal"},
        set(),
    ),
    "sliding and full, no flag": (
        1,
        {"layer_types": ["sliding_attention", "full_attention"], "without": ["is_causal"]},
        {"dflash.attention.causal", "dflash.attention.causal_swa"},
        set(),
    ),
    "window without use_sliding_window": (
        1,
        {"without": ["use_sliding_window"]},
        {"dflash.attention.sliding_window", "dflash.attention.sliding_window_pattern"},
        set(),
    ),
    "use_swa": (
        1,
        {"dflash_config": {"use_swa": True, "swa_window_size": 16}, "without": ["layer_types", "is_causal"]},
        {"dflash.attention.causal"},
        set(),
    ),
    "scales": (
        2,
        {
            "dflash_config": {
                "output_multiplier": 0.19611613513818404,
                "final_logit_softcapping": 20.0,
                "input_embedding_scale": 8.0,
                "attention_value_scale": 0.612,
            }
        },
        set(),
        set(),
    ),
    "partial rotary": (
        1,
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "without": ["rope_theta"]},
        set(),
        set(),
    ),
    "linear rope": (1, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, set(), set()),
    "yarn rope": (
        1,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        set(),
        set(),
    ),
    "yarn rope with its own attention factor": (
        1,
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
        },
        {"dflash.rope.scaling.attn_factor"},
        set(ONLY_UPSTREAM),
    ),
    "neighbouring rotary pairs": (2, {"rope_is_neox_style": False}, set(), set()),
    "rank that is no multiple of 32": (2, {"dflash_config": {"selector_rank": 24}}, set(), set()),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_variants_convert_as_upstream_does(upstream, tmp_path, case):
    version, changes, only_ours, only_upstream = CONFIGS[case]
    config = drafter_config(version, **changes)
    drafter = write_checkpoint(tmp_path / "Tiny-DFlash", config, drafter_tensors(config))
    target = make_target(tmp_path / "target.gguf")
    convert(drafter, target, tmp_path / "ours.gguf", outtype="q8_0")
    theirs = upstream.convert(drafter, target, tmp_path / "upstream.gguf", "q8_0")
    assert_same_file(read_gguf_info(tmp_path / "ours.gguf"), theirs, only_ours, only_upstream)


def test_mrope_target_gives_the_sections_of_upstream(upstream, tmp_path):
    drafter = make_drafter(tmp_path / "drafter")
    target = make_target(tmp_path / "target.gguf", architecture="qwen35", mrope=True)
    convert(drafter, target, tmp_path / "ours.gguf")
    theirs = upstream.convert(drafter, target, tmp_path / "upstream.gguf", "bf16")
    ours = read_gguf_info(tmp_path / "ours.gguf")
    assert ours.metadata["dflash.rope.dimension_sections"] == (8, 0, 0, 0)
    assert_same_file(ours, theirs, set(), set())


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_source_dtypes_and_own_embeddings_convert_as_upstream_does(upstream, tmp_path, dtype):
    config = drafter_config(1)
    tensors = drafter_tensors(config)
    shape = (config["vocab_size"], config["hidden_size"])
    for seed, name in enumerate(("embed_tokens.weight", "lm_head.weight")):
        tensors[name] = drafter_tensors({**config, "intermediate_size": shape[0]}, seed)["layers.0.mlp.up_proj.weight"]
        assert tensors[name].shape == shape
    renamed = {f"model.{name}": values for name, values in tensors.items()}
    drafter = write_checkpoint(tmp_path / "drafter", config, renamed, dtype=dtype, shards=2)
    target = make_target(tmp_path / "target.gguf")
    convert(drafter, target, tmp_path / "ours.gguf", outtype="bf16")
    theirs = upstream.convert(drafter, target, tmp_path / "upstream.gguf", "bf16")
    assert_same_file(read_gguf_info(tmp_path / "ours.gguf"), theirs, set(), set())


def test_model_card_facts_are_those_of_upstream(upstream, tmp_path):
    drafter = make_drafter(tmp_path / "Tiny-4B-DFlash2")
    (drafter / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-4B\ntags:\n- dflash\nlanguage: [en]\n---\ntext\n"
    )
    target = make_target(tmp_path / "target.gguf")
    convert(drafter, target, tmp_path / "ours.gguf")
    theirs = upstream.convert(drafter, target, tmp_path / "upstream.gguf", "bf16")
    ours = read_gguf_info(tmp_path / "ours.gguf")
    assert ours.metadata["general.license"] == "apache-2.0"
    assert ours.metadata["general.base_model.0.name"] == "Qwen3 4B"
    assert_same_file(ours, theirs, set(), set())
