"""How each engine starts a pair: install line, command, what it counts and where its limits are.

A recipe is a row of `RECIPES`; its functions make the steps for one pair, and say why the engine cannot run it.
`version` is the release whose command line the tests hold the recipe to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from dflash2.errors import RecipeError
from dflash2.modelfiles import recipe_checkpoints as checkpoints
from dflash2.modelfiles import recipe_gguf as files
from dflash2.modelfiles.recipe_pair import PairNames
from dflash2.modelfiles.recipe_steps import Choose, Run, Step, Write, run

Counts = Literal["block size", "block size - 1", "by itself"]

_ONE_REQUEST = (
    "Made for one request at a time: what drafting gains shrinks with every further one. For many users, or when one "
    "machine is no longer enough: SGLang or vLLM (`dflash2 command sglang PAIR`, `dflash2 command vllm PAIR`)."
)
_QUANTISED_MLX = 5


@dataclass(frozen=True)
class Recipe:
    """One engine.

    `counts` says what its number of draft tokens means; `max_block` caps the block size (tokens). `install` are shell
    lines. `steps(pair, tokens)` are what to do, `obstacle(pair)` why it cannot be done, `notes(pair)` what only this
    pair has to know. `proof` says what the tests hold the command against.
    """

    key: str
    title: str
    runs_on: str
    version: str
    install: tuple[str, ...]
    counts: Counts
    steps: Callable[[PairNames, int], tuple[Step, ...]]
    obstacle: Callable[[PairNames], str | None]
    notes: Callable[[PairNames], tuple[str, ...]]
    limits: tuple[str, ...]
    source: str
    proof: str
    max_block: int | None = None

    def tokens(self, block_size: int) -> int:
        """The number of draft tokens as this engine counts them, for a drafter of `block_size` tokens."""
        block = min(block_size, self.max_block or block_size)
        return block if self.counts == "block size" else block - 1


def _llama_cpp(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = files.served(pair)
    options = "--spec-type draft-dflash", f"--spec-draft-n-max {tokens}", "-np 1"
    return *before, run("llama-server", target, drafter, *options)


def _ollama(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = files.imported(pair)
    modelfile = _modelfile(target, drafter, f"PARAMETER draft_num_predict {tokens}")
    name = files.ollama_name(pair)
    return *before, modelfile, run(("ollama", "create", name), "-f Modelfile"), run(("ollama", "run", name))


def _ollama_mlx(pair: PairNames, _tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.folders(pair)
    name = files.ollama_name(pair)
    create = run(("ollama", "create", name), "--experimental", "--draft-quantize int4", "-f Modelfile")
    return *before, _modelfile(target, drafter), create, run(("ollama", "run", name))


def _modelfile(target: str, drafter: str, *more: str) -> Write:
    """The Modelfile; raises RecipeError for a path that it would not hold as it is."""
    for path in (target, drafter):
        if '"' in path or path != path.strip():
            raise RecipeError(f"a Modelfile cannot name {path!r}; move or rename it.")
    return Write("Modelfile", (f"FROM {target}", f"DRAFT {drafter}", *more))


def _sglang(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.names(pair)
    return *before, run(
        "python -m sglang.launch_server",
        ("--model-path", target),
        "--speculative-algorithm DFLASH",
        ("--speculative-draft-model-path", drafter),
        f"--speculative-num-draft-tokens {tokens}",
    )


def _vllm(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.names(pair)
    config = {"method": "dflash", "model": drafter, "num_speculative_tokens": tokens}
    if not pair.causal:
        config["attention_backend"] = "flash_attn"
    return *before, _vllm_serve(target, config)


def _vllm_tpu(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.names(pair)
    return *before, _vllm_serve(target, {"method": "dflash", "model": drafter, "num_speculative_tokens": tokens})


def _vllm_serve(target: str, config: dict[str, object]) -> Run:
    return run(("vllm", "serve", target), ("--speculative-config", json.dumps(config, ensure_ascii=False)))


def _tensorrt_llm(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.names(pair)
    lines = (
        "speculative_config:",
        "  decoding_type: DFlash",
        f"  max_draft_len: {tokens}",
        f"  speculative_model: {json.dumps(drafter, ensure_ascii=False)}",
    )
    return *before, Write("dflash.yaml", lines), run(("trtllm-serve", target), "--config dflash.yaml")


def _omlx(pair: PairNames, tokens: int) -> tuple[Step, ...]:
    before, target, drafter = checkpoints.folders(pair, "models", fetch_drafter=False)
    settings = {
        "dflash_enabled": True,
        "dflash_draft_model": drafter,
        "dflash_draft_quant_enabled": True,
        "dflash_block_size": tokens,
        "dflash_verify_mode": "dflash",
    }
    where = f"settings of the model {target.rsplit('/', 1)[-1]}, in http://localhost:8000/admin"
    return *before, run("omlx serve --model-dir models"), Choose(where, settings)


def _no_notes(_pair: PairNames) -> tuple[str, ...]:
    return ()


def _vllm_notes(pair: PairNames) -> tuple[str, ...]:
    notes = []
    if not pair.causal:
        notes.append(
            "This drafter's attention is not causal inside the block, which its attention_backend must be able to do: "
            "flash_attn, flashinfer, triton_attn or flex_attention. The target's own backend stays as it is."
        )
    if pair.method != 1:
        notes.append(
            "DFlash 2 needs vLLM 0.28 or later and its V2 model runner, which it chooses by itself; "
            "with VLLM_USE_V2_MODEL_RUNNER=0 it refuses the drafter."
        )
    return tuple(notes)


def _tpu_obstacle(pair: PairNames) -> str | None:
    if pair.method == 2:
        return "tpu-inference 0.32.0 knows DFlash drafters only, not DFlash 2"
    if pair.architecture not in (None, "qwen3", "llama"):
        return f"tpu-inference 0.32.0 drafts for qwen3 and llama targets, not for {pair.architecture}"
    return checkpoints.obstacle(pair)


def _tensorrt_notes(pair: PairNames) -> tuple[str, ...]:
    if pair.method == 1:
        return ()
    return ("Leave attention_backend at VANILLA: TRTLLM is refused for DFlash 2 drafters.",)


def _ollama_mlx_notes(pair: PairNames) -> tuple[str, ...]:
    if pair.method == 1:
        return ()
    return ("DFlash 2 needs an Ollama with pull request 17865, which no release had in November 2026.",)


def _ollama_notes(pair: PairNames) -> tuple[str, ...]:
    notes = files.notes(pair)
    if pair.method == 1:
        return notes
    return (
        *notes,
        "Ollama 0.33's own llama.cpp is older than DFlash 2 and fails with 'wrong number of tensors'; "
        "run `dflash2 ollama runner install` once.",
    )


def _llama_cpp_notes(pair: PairNames) -> tuple[str, ...]:
    notes = files.notes(pair)
    if pair.method == 1:
        return notes
    return *notes, "DFlash 2 needs a llama.cpp of 27 August 2026 or later; `dflash2 build` makes one, patched."


def _omlx_notes(pair: PairNames) -> tuple[str, ...]:
    return () if pair.method == 1 else ("DFlash 2 needs oMLX 0.6.3 or later.",)


RECIPES = (
    Recipe(
        key="llama.cpp",
        title="llama.cpp",
        runs_on="any CPU or GPU",
        version="0c1e57098",
        install=("brew install llama.cpp  # macOS and Linux; Windows: winget install llama.cpp",),
        counts="block size - 1",
        steps=_llama_cpp,
        obstacle=files.obstacle,
        notes=_llama_cpp_notes,
        limits=(
            _ONE_REQUEST,
            "A model larger than this machine: add `--rpc HOST:PORT,...`, the rpc-servers of other machines; "
            "they ask for no password, so keep them in a network that you trust.",
        ),
        source="facts of the DFlash 2 announcement; llama-server --help",
        proof="the real llama-server loads the pair with this command",
    ),
    Recipe(
        key="ollama",
        title="Ollama, GGUF",
        runs_on="any CPU or GPU",
        version="0.33.0-rc2",
        install=("curl -fsSL https://ollama.com/install.sh | sh  # Linux; macOS: brew install ollama",),
        counts="block size - 1",
        steps=_ollama,
        obstacle=files.imported_obstacle,
        notes=_ollama_notes,
        limits=(
            "Ollama checks nothing of the drafter; `dflash2 check DRAFTER TARGET` does.",
            "Without draft_num_predict it drafts 4 tokens; 0 turns drafting off.",
            "Two models on one base with different drafters share a runner until it unloads: `ollama stop NAME`.",
            _ONE_REQUEST,
        ),
        source="Ollama's parser and server, v0.33.0-rc2",
        proof="the Modelfile's keys and values against what Ollama's parser takes",
    ),
    Recipe(
        key="ollama-mlx",
        title="Ollama, MLX",
        runs_on="Apple Silicon, or CUDA 13",
        version="0.33.0-rc2",
        install=("brew install ollama  # macOS; Linux: curl -fsSL https://ollama.com/install.sh | sh",),
        counts="by itself",
        steps=_ollama_mlx,
        obstacle=checkpoints.obstacle,
        notes=_ollama_mlx_notes,
        limits=(
            "Ollama's MLX engine wires DFlash for Laguna targets only.",
            "The depth adapts by itself, up to block size - 1; PARAMETER draft_num_predict is ignored.",
            "Targets quantised for MLX gain up to a block of 5, no more: their matrix products are slow on more rows.",
            "The server must be on this machine, and both folders must hold real files (`hf download --local-dir`).",
            _ONE_REQUEST,
        ),
        source="Ollama's MLX runner, v0.33.0-rc2; ollama pull request 17865",
        proof="the Modelfile's keys and values against what Ollama's parser takes",
    ),
    Recipe(
        key="sglang",
        title="SGLang",
        runs_on="NVIDIA, Ascend, Intel XPU",
        version="0.5.23",
        install=("pip install 'sglang>=0.5.23'",),
        counts="block size",
        steps=_sglang,
        obstacle=checkpoints.obstacle,
        notes=_no_notes,
        limits=(
            "Without --max-running-requests it takes 48 requests at once.",
            "More than one GPU: `--tp N`; pipeline parallelism (--pp-size) is refused with DFlash.",
        ),
        source="sglang 0.5.23: srt/arg_groups/speculative_hook.py; pull request 35371",
        proof="sglang's own parser, and its check of DFLASH options",
    ),
    Recipe(
        key="vllm",
        title="vLLM",
        runs_on="NVIDIA, AMD",
        version="0.33.0",
        install=("pip install 'vllm>=0.28'",),
        counts="block size - 1",
        steps=_vllm,
        obstacle=checkpoints.obstacle,
        notes=_vllm_notes,
        limits=("More than one GPU or machine: `--tensor-parallel-size N`.",),
        source="vllm 0.33.0: config/speculative.py, config/vllm.py; pull request 52816",
        proof="vLLM's own parser and configuration classes, on a small pair",
    ),
    Recipe(
        key="vllm-tpu",
        title="vLLM on TPU",
        runs_on="Google TPU",
        version="0.32.0",
        install=("pip install vllm-tpu",),
        counts="block size - 1",
        steps=_vllm_tpu,
        obstacle=_tpu_obstacle,
        notes=_no_notes,
        limits=("DFlash drafters of dense Qwen3 and Llama targets only; DFlash 2 is not in tpu-inference 0.32.0.",),
        source="tpu-inference 0.32.0: models/common/model_loader.py, models/jax",
        proof="vLLM's own parser; tpu-inference's source for what it registers",
    ),
    Recipe(
        key="tensorrt-llm",
        title="TensorRT-LLM",
        runs_on="NVIDIA",
        version="1.4.0rc1",
        install=("pip install 'tensorrt-llm>=1.4.0rc1'  # needs the CUDA toolkit and libopenmpi-dev",),
        counts="block size - 1",
        steps=_tensorrt_llm,
        obstacle=checkpoints.obstacle,
        notes=_tensorrt_notes,
        limits=(
            "Drafting cannot be switched off while it runs, so that it pays at small batches only.",
            "Taps and mask token are read from the drafter's config.json.",
        ),
        source="TensorRT-LLM 1.4.0rc1: llm-api/reference/DFlashDecodingConfig",
        proof="the documented fields of DFlashDecodingConfig; the class itself where it is installed",
    ),
    Recipe(
        key="omlx",
        title="oMLX",
        runs_on="Apple Silicon",
        version="0.6.3",
        install=("brew tap jundot/omlx https://github.com/jundot/omlx && brew install omlx",),
        counts="block size",
        steps=_omlx,
        obstacle=checkpoints.obstacle,
        notes=_omlx_notes,
        limits=(
            f"Targets quantised for MLX: a block of {_QUANTISED_MLX} at most, for their matrix products are slow on "
            "more rows; for an unquantised target set dflash_block_size to the drafter's own.",
            "A drafter that fails to load leaves the model running without it: look for 'DFlashEngine loaded' in "
            "~/.omlx/logs/server.log.",
            "mtp_enabled must be off.",
        ),
        source="oMLX: omlx/model_settings.py; pull request 2840",
        proof="the settings' names and values against oMLX's published source",
        max_block=_QUANTISED_MLX,
    ),
)


def recipe(name: str) -> Recipe | None:
    """The recipe of the engine `name`, in any case and with or without its dots and hyphens; None if there is none."""
    wanted = _plain(name)
    return next((one for one in RECIPES if wanted == _plain(one.key)), None)


def close_engines(name: str) -> tuple[str, ...]:
    """Names of engines that resemble `name`, the most similar first."""
    by_plain = {_plain(one.key): one.key for one in RECIPES}
    return tuple(by_plain[plain] for plain in get_close_matches(_plain(name), by_plain, cutoff=0.5))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.casefold())
