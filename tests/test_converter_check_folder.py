"""`check` against a target that is a Hugging Face folder, and a checkpoint with a tokenizer of its own."""

import json

import pytest
from factories import make_drafter, make_target
from factories_tokenizers import QWEN2_PATTERN, folder_of

from dflash2.converter import check, convert
from dflash2.gguf_info import read_gguf_info


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def folder(tmp_path, target):
    return folder_of(read_gguf_info(target), tmp_path / "hf", "Qwen3ForCausalLM", QWEN2_PATTERN)


def tokens_of(report):
    return next(finding for finding in report.findings if finding.key == "tokens")


def test_a_hugging_face_folder_is_a_target(tmp_path, target, folder):
    drafter = convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf").output
    report = check(drafter, folder)
    assert tokens_of(report).found == "equal"
    assert report.passes(strict=True), report.problems


def test_a_checkpoint_with_another_models_tokenizer_is_an_error(tmp_path, target, folder):
    drafter = make_drafter(tmp_path / "drafter")
    (drafter / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert tokens_of(check(drafter, target)).level == "ok"
    content = json.loads((drafter / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    (drafter / "tokenizer.json").write_text(json.dumps(content))
    finding = tokens_of(check(drafter, target))
    assert finding.level == "error"
    assert "token 2 is '#'" in finding.found
