"""Hazards of published files that `check`, `inspect` and `upgrade` answer; numbers are those of the facts file."""

import pytest
from factories import make_drafter, make_target
from factories_check import edited_gguf, make_fork, tensor_bytes
from gguf import GGUFReader
from gguf.constants import GGUFValueType

from dflash2.converter import check, convert, inspect, upgrade
from dflash2.runtime.pair import read_pair


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def converted(tmp_path, target):
    return convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "converted.gguf").output


def retokenized(source, output, edit):
    tokens = GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    key = {"tokenizer.ggml.tokens": (edit(tokens), GGUFValueType.ARRAY, GGUFValueType.STRING)}
    return edited_gguf(source, output, set_keys=key)


def tokens_finding(report):
    return next(finding for finding in report.findings if finding.key == "tokens")


def test_hazard_07_tokenizer_of_another_model_is_an_error_though_the_length_is_equal(tmp_path, converted, target):
    other = retokenized(converted, tmp_path / "other.gguf", lambda tokens: [*tokens[:2], *reversed(tokens[2:])])
    report = check(other, target)
    finding = tokens_finding(report)
    assert finding.level == "error"
    assert finding.expected == "id 2 is '!'"
    assert finding.found.endswith("; 286 of 288 ids differ")
    assert not report.passes()


def test_hazard_07_one_renamed_token_is_a_warning_that_names_it(tmp_path, converted, target):
    other = retokenized(converted, tmp_path / "other.gguf", lambda tokens: [*tokens[:100], "renamed", *tokens[101:]])
    report = check(other, target)
    finding = tokens_finding(report)
    assert (finding.level, finding.found) == ("warning", "id 100 is 'renamed'; 1 of 288 ids differ")
    assert report.passes()


def test_hazard_07_vocabulary_of_another_length_is_an_error(tmp_path, converted):
    longer = make_target(tmp_path / "longer.gguf", vocab=300)
    finding = next(finding for finding in check(converted, longer).findings if finding.key == "vocab_size")
    assert (finding.level, finding.expected, finding.found) == ("error", 300, 288)


def test_hazard_12_a_fork_drafter_is_named_with_the_command_that_helps(tmp_path, converted):
    seen = inspect(make_fork(converted, tmp_path / "fork.gguf"))
    assert (seen.kind, seen.architecture) == ("fork drafter", "dflash-draft")
    assert (seen.drafter.version, seen.drafter.taps, seen.drafter.mask_token_id) == (2, (1, 3, 4), 1)
    assert [(finding.key, finding.fix) for finding in seen.problems] == [
        ("architecture", "run dflash2 upgrade: only the metadata is rewritten")
    ]


def test_hazard_12_a_fork_drafter_is_upgraded_and_taken_by_the_runtime(tmp_path, converted, target):
    done = upgrade(make_fork(converted, tmp_path / "fork.gguf"), tmp_path / "new.gguf")
    spec = read_pair(target, done.output)
    assert (spec.taps, spec.mask_token, spec.block_size, spec.top_k) == ((1, 3, 4), 1, 4, 4)
    assert tensor_bytes(done.output) == tensor_bytes(converted)


def test_hazard_12_missing_rope_sections_show_only_with_the_target_and_are_added(tmp_path, converted):
    mrope = make_target(tmp_path / "mrope.gguf", architecture="qwen35", mrope=True)
    assert inspect(converted).problems == ()
    report = check(converted, mrope)
    finding = next(finding for finding in report.findings if finding.key == "rope_sections")
    assert (finding.level, finding.expected, finding.found) == ("error", [8, 0, 0, 0], [])
    assert not report.passes()
    done = upgrade(converted, tmp_path / "new.gguf", target=mrope)
    assert check(done.output, mrope).passes(strict=True)
