"""The `ollama create` line for every shell, and the name of a model."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.errors import ModelfileError, OptionError
from dflash2.modelfiles import (
    Modelfile,
    check_draft_quantization,
    compose,
    create_arguments,
    left_behind,
    model_name,
    route_notes,
    shell_lines,
)


@pytest.fixture
def files(tmp_path):
    """A target and a drafter; only their paths matter here."""
    for name in ("t.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path / "t.gguf", tmp_path / "d.gguf"


def test_only_the_first_from_is_replaced(files):
    target, drafter = files
    base = b"FROM old\nFROM ./mmproj.gguf\nDRAFT a\nDRAFT b\n"
    made = Modelfile.parse(compose(target, drafter, {}, base))
    assert made.values("model") == (str(target), "./mmproj.gguf")
    assert made.values("draft") == (str(drafter),)


def test_what_ollama_would_refuse_or_take_for_a_name_is_not_written(files, tmp_path):
    target, drafter = files
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ModelfileError, match="cannot be both FROM and DRAFT"):
        compose(target, tmp_path / "link", {})
    with pytest.raises(ModelfileError, match="is not there, and Ollama would take it for the name of a model"):
        compose(target, tmp_path / "missing", {})
    with pytest.raises(ModelfileError, match=r"would refuse the Modelfile: invalid float value \[x\]; correct"):
        compose(target, drafter, {"top_p": ("x",)})


def test_relative_paths_that_a_move_would_break_are_named(files):
    folder = files[0].parent
    made = Modelfile.parse("FROM t.gguf\nFROM d.gguf\nFROM llama3\nADAPTER ./t.gguf\nADAPTER /t.gguf\n")
    assert left_behind(made, folder) == ("d.gguf", "./t.gguf")


def test_the_mlx_route_says_what_it_ignores():
    made = Modelfile.parse("FROM a\nADAPTER b\nMESSAGE user c\n")
    assert route_notes("mlx", made)[0] == "the mlx route ignores MESSAGE and ADAPTER"
    assert not any("ignores" in note for note in route_notes("mlx", Modelfile.parse("FROM a\n")))


@given(st.lists(st.text(st.characters(blacklist_characters="\x00")), min_size=1))
def test_the_line_for_sh_splits_into_its_arguments(arguments):
    assert shlex.split(shell_lines(arguments, windows=False)[0]) == arguments


def test_windows_has_two_shells_where_they_differ():
    plain = create_arguments("m", "C:\\models\\Modelfile", "gguf")
    assert shell_lines(plain, windows=True) == ("ollama create m -f C:\\models\\Modelfile",)
    odd = create_arguments("m", "C:\\it's $mine\\Modelfile", "mlx", "int4")
    assert shell_lines(odd, windows=True) == (
        'ollama create m -f "C:\\it\'s $mine\\Modelfile" --experimental --draft-quantize int4',
        "ollama create m -f 'C:\\it''s $mine\\Modelfile' --experimental --draft-quantize int4",
    )


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("ggml-org/Qwen3.8-27B-GGUF", "qwen3.8-27b-dflash2"),
        ("/models/My Model.Q4_K_M.gguf", "my-model.q4_k_m-dflash2"),
        ("C:\\models\\é.gguf", "model-dflash2"),
        ("x" * 200, "x" * 72 + "-dflash2"),
    ],
)
def test_names_are_those_that_ollama_takes(label, name):
    assert model_name(label) == name


def test_quantisations_belong_to_routes():
    assert check_draft_quantization("gguf", "q4_k_m", "BF16") == "Q4_K_M"
    assert check_draft_quantization("mlx", "NVFP4", None) == "nvfp4"
    with pytest.raises(OptionError, match="Q8_0 is not possible on the mlx route; give one of int4"):
        check_draft_quantization("mlx", "Q8_0", None)
    with pytest.raises(OptionError, match="and this one is of unknown type"):
        check_draft_quantization("gguf", "Q8_0", None)
