"""Launch recipes of all engines: the exact commands, what they count, which pairs they refuse, and their quoting."""

import json
import re
import shlex
import subprocess

import pytest
import yaml
from click.testing import CliRunner
from factories import make_drafter, make_target
from hypothesis import given
from hypothesis import strategies as st

from dflash2 import converter
from dflash2.commands.command import command
from dflash2.errors import RecipeError
from dflash2.modelfiles import RECIPES, PairNameError, close_engines, launch, pair_names, recipe
from dflash2.modelfiles.recipe_steps import Run, Write, script

PUBLISHED = [one.entry.key for one in converter.availability()]
ENGINES = [one.key for one in RECIPES]

EXACT = {
    "llama.cpp": """\
llama-server \\
    -hf ggml-org/Qwen3.8-27B-GGUF:Q4_K_M \\
    -hfd incoai/Qwen3.8-27B-DFlash2-GGUF:Q4_K_M \\
    --spec-type draft-dflash \\
    --spec-draft-n-max 7 \\
    -np 1
""",
    "ollama": """\
dflash2-convert qwen3.8-27b -o dflash-Qwen3.8-27B-DFlash2.gguf
cat > Modelfile <<'END'
FROM hf.co/ggml-org/Qwen3.8-27B-GGUF:Q4_K_M
DRAFT ./dflash-Qwen3.8-27B-DFlash2.gguf
PARAMETER draft_num_predict 7
END
ollama create qwen3.8-27b-dflash2 -f Modelfile
ollama run qwen3.8-27b-dflash2
""",
    "ollama-mlx": """\
hf download Qwen/Qwen3.8-27B --local-dir ./Qwen3.8-27B
hf download incoai/Qwen3.8-27B-DFlash2 --local-dir ./Qwen3.8-27B-DFlash2
cat > Modelfile <<'END'
FROM ./Qwen3.8-27B
DRAFT ./Qwen3.8-27B-DFlash2
END
ollama create qwen3.8-27b-dflash2 --experimental --draft-quantize int4 -f Modelfile
ollama run qwen3.8-27b-dflash2
""",
    "sglang": """\
python -m sglang.launch_server \\
    --model-path Qwen/Qwen3.8-27B \\
    --speculative-algorithm DFLASH \\
    --speculative-draft-model-path incoai/Qwen3.8-27B-DFlash2 \\
    --speculative-num-draft-tokens 8
""",
    "vllm": """\
vllm serve Qwen/Qwen3.8-27B \\
    --speculative-config '{"method": "dflash", "model": "incoai/Qwen3.8-27B-DFlash2", "num_speculative_tokens": 7, \
"attention_backend": "flash_attn"}'
""",
    "tensorrt-llm": """\
cat > dflash.yaml <<'END'
speculative_config:
  decoding_type: DFlash
  max_draft_len: 7
  speculative_model: "incoai/Qwen3.8-27B-DFlash2"
END
trtllm-serve Qwen/Qwen3.8-27B --config dflash.yaml
""",
    "omlx": """\
hf download Qwen/Qwen3.8-27B --local-dir ./models/Qwen3.8-27B
omlx serve --model-dir models
# settings of the model Qwen3.8-27B, in http://localhost:8000/admin:
#   dflash_enabled = true
#   dflash_draft_model = "incoai/Qwen3.8-27B-DFlash2"
#   dflash_draft_quant_enabled = true
#   dflash_block_size = 5
#   dflash_verify_mode = "dflash"
""",
}


def launched(engine, *names, **options):
    return launch(recipe(engine), pair_names(*map(str, names), **options))


def bash_arguments(step: Run) -> tuple[str, ...]:
    """The words that bash makes of the command."""
    printed = subprocess.run(
        ["bash"], input=f"printf '%s\\0' {step.shell()}\n", text=True, check=True, capture_output=True
    ).stdout
    return tuple(printed.split("\0")[:-1])


def invoke(*arguments):
    return CliRunner().invoke(command, list(map(str, arguments)))


@pytest.mark.parametrize("engine", EXACT)
def test_command_of_the_published_dflash2_pair(engine):
    assert launched(engine, "qwen3.8-27b").script == EXACT[engine]


def test_command_for_tpu():
    text = launched("vllm-tpu", "llama-3.1-8b").script
    config = json.loads(shlex.split(text.replace("\\\n", ""))[-1])
    assert config == {
        "method": "dflash",
        "model": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "num_speculative_tokens": 9,
    }


def test_every_recipe_has_its_command_here():
    assert {*EXACT, "vllm-tpu"} == set(ENGINES)


def test_draft_tokens_as_each_engine_counts_them():
    counted = {one.key: (one.tokens(8), one.tokens(16), one.tokens(4)) for one in RECIPES}
    assert counted == {
        "llama.cpp": (7, 15, 3),
        "ollama": (7, 15, 3),
        "ollama-mlx": (7, 15, 3),
        "sglang": (8, 16, 4),
        "vllm": (7, 15, 3),
        "vllm-tpu": (7, 15, 3),
        "tensorrt-llm": (7, 15, 3),
        "omlx": (5, 5, 4),
    }


@pytest.mark.parametrize(
    ("engine", "pair", "reason"),
    [
        ("vllm-tpu", "qwen3.8-27b", "knows DFlash drafters only, not DFlash 2"),
        ("vllm-tpu", "qwen3.6-27b", "drafts for qwen3 and llama targets, not for qwen35"),
        ("llama.cpp", "kimi-k2.5", "publishes no layer inputs for deepseek2 targets"),
        ("ollama", "glm-5.3-flash", "publishes no layer inputs for glm5-next targets"),
        ("llama.cpp", "gpt-oss-20b", "it is not converted: its attention biases are not zero"),
    ],
)
def test_pair_that_an_engine_cannot_run_is_refused_with_the_reason(engine, pair, reason):
    with pytest.raises(RecipeError, match=f"cannot run .*{reason}"):
        launched(engine, pair)


@pytest.mark.parametrize("engine", ["llama.cpp", "ollama"])
def test_conversion_of_every_published_pair_has_the_options_that_it_needs(engine):
    needed = {}
    for one in converter.availability():
        if one.entry.converts != "with-option":
            continue
        block_size = None if one.entry.block_size else 8
        convert = launched(engine, one.entry.key, block_size=block_size).steps[0].argv
        needed[one.entry.key] = set(re.findall(r"--[a-z-]+", one.entry.conversion))
        assert needed[one.entry.key] <= set(convert), convert
    assert needed == {
        "mimo-v2.5-pro": {"--rope-theta", "--target"},
        "nemotron-3.5-lightning-30b-a3b": {"--block-size"},
    }


def test_command_of_a_drafter_with_two_rope_bases_says_what_to_fill_in():
    said = invoke("llama.cpp", "mimo-v2.5-pro", "--command-only").output
    assert said.startswith(
        "dflash2-convert mimo-v2.5-pro \\\n    --target MiMo-V2.5-Pro-FP4-DFlash.gguf \\\n    --rope-theta THETA \\\n"
    )
    notes = " ".join(launched("llama.cpp", "mimo-v2.5-pro").notes)
    assert "MiMo-V2.5-Pro-FP4-DFlash.gguf is your GGUF file" in notes
    assert "THETA stands for rope_theta or backbone_rotary_base" in notes


def test_drafter_that_needs_its_targets_gguf_is_not_given_a_repository():
    with pytest.raises(RecipeError, match="converted with its target's GGUF file: give TARGET as a file"):
        launched("llama.cpp", "someone/MiMo-GGUF", "mimo-v2.5-pro")


@pytest.mark.parametrize("pair", PUBLISHED)
@pytest.mark.parametrize("engine", ENGINES)
def test_script_is_what_its_steps_say(engine, pair):
    """Bash reads every script, and splits each command into the very arguments of its step."""
    try:
        found = launched(engine, pair, block_size=8 if pair.startswith("nemotron") else None)
    except RecipeError as error:
        assert " cannot run " in str(error)
        return
    subprocess.run(["bash", "-n"], input=found.script, text=True, check=True)
    for step in found.steps:
        if isinstance(step, Run):
            assert bash_arguments(step) == step.argv
    assert "one request" in " ".join(found.notes) or not engine.startswith(("llama", "ollama"))


@given(st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1), min_size=1))
def test_any_arguments_come_back_from_the_shell(arguments):
    assert list(bash_arguments(Run(tuple((argument,) for argument in arguments)))) == arguments


def test_bash_gets_the_arguments_and_the_file(tmp_path):
    steps = (Write("a b.txt", ("FROM $HOME `x`", "DRAFT ./d'\"")), Run((("cat", "a b.txt"),)))
    output = subprocess.run(["bash"], input=script(steps), text=True, check=True, capture_output=True, cwd=tmp_path)
    assert output.stdout == "FROM $HOME `x`\nDRAFT ./d'\"\n"


def test_block_size_and_method_come_from_a_local_drafter(tmp_path):
    folder = make_drafter(tmp_path / "drafter")
    names = pair_names("Qwen/Qwen3-4B", str(folder))
    block = json.loads((folder / "config.json").read_text())["dflash_config"]["block_size"]
    assert (names.block_size, names.method) == (block, 2)
    assert launched("sglang", "Qwen/Qwen3-4B", folder).tokens == block


def test_gguf_pair_gives_its_block_size_to_llama_server(drafter_gguf, target_path):
    found = launched("llama.cpp", target_path, drafter_gguf)
    assert found.steps[-1].argv == (
        *("llama-server", "-m", str(target_path), "-md", str(drafter_gguf)),
        *("--spec-type", "draft-dflash", "--spec-draft-n-max", "7", "-np", "1"),
    )
    assert (found.pair.method, found.pair.architecture) == (2, "qwen3")


def test_checkpoint_is_converted_with_the_given_target_first(drafter_dir, target_path):
    found = launched("llama.cpp", target_path, drafter_dir)
    assert found.steps[0].argv == (
        *("dflash2-convert", str(drafter_dir), "--target", str(target_path)),
        *("-o", f"dflash-{drafter_dir.name}.gguf"),
    )


def test_published_drafter_with_a_target_of_the_user(tmp_path):
    target = make_target(tmp_path / "Qwen3-4B-Q8_0.gguf")
    found = launched("llama.cpp", target, "qwen3-4b")
    assert found.steps[0].argv[:4] == ("dflash2-convert", "qwen3-4b", "--target", str(target))
    assert found.steps[1].argv[1:5] == ("-m", str(target), "-md", "dflash-Qwen3-4B-DFlash-b16.gguf")


def test_drafter_of_another_architecture_than_the_target_is_refused(target_path):
    with pytest.raises(RecipeError, match=r"drafts for Qwen/Qwen3.6-27B, and .* is a qwen3 model"):
        pair_names(str(target_path), "qwen3.6-27b")


def test_models_in_the_wrong_order_are_refused(target_path, drafter_gguf):
    with pytest.raises(RecipeError, match="is a DFlash drafter, not its target"):
        pair_names(str(drafter_gguf), str(drafter_gguf))
    with pytest.raises(RecipeError, match="is a qwen3 model and no DFlash drafter"):
        pair_names("Qwen/Qwen3-4B", str(target_path))


def test_engines_that_read_checkpoints_refuse_gguf(target_path, drafter_gguf):
    for engine in ("vllm", "sglang", "tensorrt-llm", "omlx", "ollama-mlx"):
        with pytest.raises(RecipeError, match=r"it reads checkpoints, and .* is GGUF"):
            launched(engine, target_path, drafter_gguf)


def test_drafter_in_a_folder_of_its_targets_repository_is_named_by_path():
    argv = launched("sglang", "mimo-v2.5-pro").steps[-1].argv
    assert argv[argv.index("--model-path") + 1] == "./MiMo-V2.5-Pro-FP4-DFlash"
    assert argv[argv.index("--speculative-draft-model-path") + 1] == "./MiMo-V2.5-Pro-FP4-DFlash/dflash"


def test_causal_drafter_needs_no_special_attention_backend():
    assert "attention_backend" not in launched("vllm", "laguna-xs-2.1").script
    assert "attention_backend" in launched("vllm", "gemma-4-31b-it").script


def test_unknown_block_size_has_to_be_given():
    with pytest.raises(PairNameError, match="give --block-size N"):
        pair_names("nemotron-3.5-lightning-30b-a3b")
    found = launched("llama.cpp", "nemotron-3.5-lightning-30b-a3b", block_size=6)
    assert found.steps[0].argv[:4] == ("dflash2-convert", "nemotron-3.5-lightning-30b-a3b", "--block-size", "6")
    assert "5" in found.steps[1].argv


def test_engine_that_adapts_by_itself_asks_for_no_block_size():
    said = invoke("ollama-mlx", "a/target", "b/drafter")
    assert said.exit_code == 0, said.output
    assert "as of 0.33.0-rc2: up to block size - 1 draft tokens, at most" in said.output
    record = json.loads(invoke("ollama-mlx", "nemotron-3.5-lightning-30b-a3b", "--json").output)
    assert (record["block_size"], record["tokens"]) == (None, None)
    assert invoke("sglang", "a/target", "b/drafter").exit_code == 2


@pytest.mark.parametrize(
    ("engine", "pair", "name"),
    [
        ("ollama-mlx", "mimo-v2.5-pro", "mimo-v2.5-pro-fp4-dflash"),
        ("ollama", "mimo-v2.5-pro", "mimo-v2.5-pro-fp4-dflash"),
        ("ollama-mlx", "laguna-xs-2.1", "laguna-xs-2.1-dflash"),
    ],
)
def test_name_in_ollama_says_the_method_once(engine, pair, name):
    found = launched(engine, pair)
    assert found.steps[-1].argv == ("ollama", "run", name)
    assert found.steps[-2].argv[:3] == ("ollama", "create", name)


def test_limits_of_mlx_name_the_targets_that_it_drafts_for():
    assert any("Laguna targets only" in note for note in launched("ollama-mlx", "qwen3.8-27b").notes)


def test_drafter_whose_config_names_no_block_size(tmp_path):
    folder = make_drafter(tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"].pop("block_size", None)
    config.pop("block_size", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairNameError, match="give --block-size N"):
        pair_names("Qwen/Qwen3-4B", str(folder))


@pytest.mark.parametrize("name", ["a\x1b[31m/b", "a\u202eb.gguf", "two\nlines"])
def test_name_that_steers_a_terminal_or_ends_a_line_is_refused(tmp_path, monkeypatch, target_path, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(target_path.read_bytes())
    with pytest.raises(RecipeError, match="cannot stand in a command"):
        pair_names(name, "incoai/Qwen3.8-27B-DFlash2-GGUF", block_size=8)


def test_path_that_a_modelfile_does_not_hold_is_refused(tmp_path, target_path, drafter_gguf):
    odd = tmp_path / 'a "b".gguf'
    odd.write_bytes(target_path.read_bytes())
    with pytest.raises(RecipeError, match="a Modelfile cannot name"):
        launched("ollama", odd, drafter_gguf)


def test_ollama_wants_the_drafter_on_disk():
    with pytest.raises(RecipeError, match="DRAFT names a file on this disk"):
        launched("ollama", "ggml-org/Qwen3.8-27B-GGUF:Q4_K_M", "incoai/Qwen3.8-27B-DFlash2-GGUF:Q4_K_M", block_size=8)


def test_engine_names_are_taken_in_any_spelling_and_close_ones_are_said():
    assert recipe("TensorRT-LLM").key == "tensorrt-llm"
    assert recipe("llamacpp").key == recipe("Llama-Cpp").key == "llama.cpp"
    assert recipe("ollama mlx").key == "ollama-mlx"
    assert recipe("vlm") is None
    assert close_engines("vlm")[0] == "vllm"
    assert close_engines("sg-lang") == ("sglang",)


def test_unknown_engine_and_pair_are_usage_errors():
    engine = invoke("vlm", "qwen3.8-27b")
    assert (engine.exit_code, "did you mean vllm" in engine.output) == (2, True)
    pair = invoke("vllm", "qwen3.8-28b")
    assert (pair.exit_code, "did you mean qwen3.8-27b" in pair.output) == (2, True)
    size = invoke("vllm", "a/b", "c/d")
    assert (size.exit_code, "give --block-size N" in size.output) == (2, True)


def test_output_is_install_line_command_and_limits():
    output = invoke("vllm", "qwen3.8-27b").output
    assert output.startswith("pip install 'vllm>=0.28'\n\n" + EXACT["vllm"])
    assert (
        "vLLM (NVIDIA, AMD), as of 0.33.0: 7 draft tokens, which it counts as the block size less the anchor" in output
    )
    assert "- DFlash 2 needs vLLM 0.28 or later" in output


def test_command_only_prints_nothing_else():
    assert invoke("sglang", "qwen3.8-27b", "--command-only").output == EXACT["sglang"]


def test_json_says_the_same():
    said = json.loads(invoke("tensorrt-llm", "qwen3.8-27b", "--json").output)
    assert said["script"] == EXACT["tensorrt-llm"]
    assert (said["schema"], said["tokens"], said["block_size"]) == ("dflash2.command/1", 7, 8)
    assert [step["kind"] for step in said["steps"]] == ["write", "run"]
    assert said["steps"][1]["argv"] == ["trtllm-serve", "Qwen/Qwen3.8-27B", "--config", "dflash.yaml"]


def test_licence_of_the_drafter_is_said():
    assert any("cc-by-nc-nd-4.0" in note for note in launched("vllm", "glm-5.3-flash").notes)
    assert any("No licence is on record" in note for note in launched("vllm", "qwen3.8-27b").notes)


# The keyword arguments of DFlashDecodingConfig as TensorRT-LLM 1.4.0rc1 documents them, and those that it needs.
TENSORRT_FIELDS = {"decoding_type", "max_draft_len", "speculative_model", "mask_token_id", "target_layer_ids"}


def test_tensorrt_config_uses_documented_fields_alone():
    (write, _) = launched("tensorrt-llm", "qwen3.8-27b").steps
    config = yaml.safe_load(write.text)
    assert config == {
        "speculative_config": {
            "decoding_type": "DFlash",
            "max_draft_len": 7,
            "speculative_model": "incoai/Qwen3.8-27B-DFlash2",
        }
    }
    assert set(config["speculative_config"]) <= TENSORRT_FIELDS


# Names and values of oMLX's ModelSettings (omlx/model_settings.py and its validation, September 2026).
OMLX_CHOICES = {
    "dflash_enabled": (True, False),
    "dflash_draft_quant_enabled": (True, False, None),
    "dflash_verify_mode": ("dflash", "adaptive", "ddtree", "off"),
}


def test_omlx_settings_are_ones_that_it_has():
    values = dict(launched("omlx", "qwen3-8b").steps[-1].values)
    assert isinstance(values.pop("dflash_draft_model"), str)
    assert values.pop("dflash_block_size") == 5
    assert set(values) == set(OMLX_CHOICES)
    assert all(value in OMLX_CHOICES[name] for name, value in values.items())
