"""The commands of the recipes, given to the engines' own parsers and configuration classes where they are installed.

The packages are large and want GPUs: none is a dependency, and a test of one that is missing is skipped. Each runs in a
process of its own, since they replace loggers and platforms on import. No weights are read: small config.json files
stand for the models.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash2.modelfiles import launch, pair_names, recipe

BASE = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
DFLASH = {"target_layer_ids": [1, 3, 5], "mask_token_id": 999, "block_size": 8}
DFLASH2 = {**DFLASH, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16}


def write_config(folder: Path, **values) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BASE, **values}))
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    """A target and its DFlash 2 drafter, all but their weights."""
    target = write_config(tmp_path / "target", architectures=["Qwen3ForCausalLM"], num_hidden_layers=8)
    drafter = write_config(
        tmp_path / "drafter",
        architectures=["DFlash2DraftModel"],
        num_hidden_layers=2,
        num_target_layers=8,
        layer_types=["sliding_attention"] * 2,
        sliding_window=128,
        use_sliding_window=True,
        is_causal=False,
        dflash_config=DFLASH2,
    )
    return target, drafter


def arguments_of(engine: str, *names: str) -> list[str]:
    found = launch(recipe(engine), pair_names(*names, block_size=8))
    return list(found.steps[-1].argv)


def installed(package: str) -> Path:
    """The folder of a package's source; skips the test without it. It is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(found.submodule_search_locations[0])


def asked(code: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Run `code` with the arguments; it prints JSON as its last line."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )


def answer(done: subprocess.CompletedProcess):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# vLLM chooses a platform by the devices at hand; where there is none, the CPU's stands in so that it can be asked.
_VLLM = """
import json, sys
import vllm.platforms as platforms
if platforms.current_platform.is_unspecified():
    from vllm.platforms.cpu import CpuPlatform
    platforms._current_platform = CpuPlatform()
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
"""
_VLLM_PARSED = "print(json.dumps([parsed.model_tag, parsed.speculative_config]))"
_VLLM_CONFIG = """
parsed.model, parsed.skip_tokenizer_init = parsed.model_tag, True
config = EngineArgs.from_cli_args(parsed).create_engine_config()
draft = config.speculative_config
print(json.dumps([draft.method, draft.num_speculative_tokens, draft.draft_model_config.architectures,
                  draft.attention_backend.name, config.use_v2_model_runner]))
"""


@pytest.mark.parametrize("engine", ["vllm", "vllm-tpu"])
def test_vllm_parses_the_command(engine):
    installed("vllm")
    program, serve, *arguments = arguments_of(engine, "qwen3-8b")
    assert (program, serve) == ("vllm", "serve")
    target, config = answer(asked(_VLLM + _VLLM_PARSED, arguments))
    assert target == "Qwen/Qwen3-8B"
    assert (config["method"], config["model"], config["num_speculative_tokens"]) == (
        "dflash",
        "z-lab/Qwen3-8B-DFlash-b16",
        7,
    )


def test_vllm_builds_its_whole_configuration_for_a_dflash2_pair(folders):
    installed("vllm")
    arguments = arguments_of("vllm", *folders)[2:]
    said = answer(asked(_VLLM + _VLLM_CONFIG, arguments, VLLM_USE_V2_MODEL_RUNNER="1"))
    assert said == ["dflash", 7, ["DFlash2DraftModel"], "FLASH_ATTN", True]


def test_vllm_refuses_a_dflash2_drafter_on_its_old_runner(folders):
    """What the recipe's note says of VLLM_USE_V2_MODEL_RUNNER."""
    installed("vllm")
    done = asked(_VLLM + _VLLM_CONFIG, arguments_of("vllm", *folders)[2:], VLLM_USE_V2_MODEL_RUNNER="0")
    assert done.returncode != 0
    assert "Model Runner V1 does not support: DFlash candidate-head drafts" in done.stderr


_SGLANG = """
import json, sys
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.speculative_hook import _handle_dflash
parsed = prepare_server_args([*sys.argv[1:], "--device", "cuda", "--skip-tokenizer-init"])
_handle_dflash(parsed)
view = resolving_view(parsed)
print(json.dumps([view.speculative_algorithm, view.speculative_draft_model_path, view.speculative_num_draft_tokens,
                  view.speculative_eagle_topk, view.max_running_requests]))
"""


def test_sglang_parses_and_checks_the_command(folders):
    installed("sglang")
    arguments = arguments_of("sglang", *folders)
    assert arguments[:3] == ["python", "-m", "sglang.launch_server"]
    assert answer(asked(_SGLANG, arguments[3:])) == ["DFLASH", folders[1], 8, 1, 48]


def test_sglang_refuses_pipeline_parallelism(folders):
    """What the recipe's limits say of --pp-size."""
    installed("sglang")
    done = asked(_SGLANG, [*arguments_of("sglang", *folders)[3:], "--pp-size", "2"])
    assert done.returncode != 0
    assert "only supports pp_size == 1" in done.stderr


def names_in(source: Path) -> set[str]:
    """Every string and every class name of a Python file."""
    tree = ast.parse(source.read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(
    ("package", "file", "dflash2"),
    [
        ("vllm", "model_executor/models/registry.py", True),
        ("sglang", "srt/models/dflash.py", True),
        ("tpu_inference", "models/common/model_loader.py", False),
    ],
)
def test_drafter_architectures_that_an_engine_registers(package, file, dflash2):
    """From their source: what the recipes say of DFlash 2 on GPUs and on TPUs."""
    names = names_in(installed(package) / file)
    assert "DFlashDraftModel" in names
    assert ("DFlash2DraftModel" in names) is dflash2


def test_tpu_targets_that_hand_layer_outputs_to_a_drafter():
    models = installed("tpu_inference") / "models"
    tapped = {path.name for path in (models / "jax").glob("*.py") if "get_dflash_aux" in path.read_text()}
    assert tapped == {"qwen3.py", "llama3.py"}


def test_tensorrt_llm_takes_the_yaml():
    if importlib.util.find_spec("tensorrt_llm") is None:
        pytest.skip("tensorrt_llm is not installed")
    from tensorrt_llm.llmapi import DFlashDecodingConfig

    (write, _) = launch(recipe("tensorrt-llm"), pair_names("qwen3.8-27b")).steps
    config = DFlashDecodingConfig(**yaml.safe_load(write.text)["speculative_config"])
    assert (config.max_draft_len, str(config.speculative_model)) == (7, "incoai/Qwen3.8-27B-DFlash2")
