"""The published pairs: the data agrees with itself, names resolve, and every field comes out."""

import json
from dataclasses import fields

import pytest

from dflash2 import native
from dflash2.commands.convert import convert
from dflash2.constants import TAPPABLE_ARCHITECTURES
from dflash2.converter import RegistryEntry, availability, close_names, list_dict, resolve
from dflash2.converter.checking.registry import registry


def test_keys_and_drafters_are_unique():
    assert len({entry.key for entry in registry()}) == len(registry()) == 17
    assert len({entry.drafter for entry in registry()}) == len(registry())


@pytest.mark.parametrize("entry", registry(), ids=lambda entry: entry.key)
def test_entry_agrees_with_itself(entry):
    assert entry.method in (1, 2)
    assert all(repository.count("/") == 1 for repository in (entry.drafter, entry.target))
    assert list(entry.taps) == sorted(set(entry.taps))
    assert entry.taps[0] >= 0
    if entry.target_layers is not None:
        assert entry.taps[-1] < entry.target_layers
    assert entry.block_size is None or 2 <= entry.block_size <= 16
    assert native.knows_architecture(entry.target_architecture)
    assert entry.converts in ("yes", "with-option", "no")
    assert (entry.conversion is None) is (entry.converts == "yes")
    if entry.converts == "with-option":
        options = {name for option in convert.params for name in option.opts}
        assert entry.conversion.split()[0] in options


def test_dflash2_pairs_come_first_with_the_facts_of_their_configs():
    assert [entry.key for entry in registry() if entry.method == 2] == [e.key for e in registry()[:3]]
    entry = resolve("qwen3.8-27b")
    assert (entry.drafter, entry.target) == ("incoai/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B")
    assert (entry.block_size, entry.mask_token_id, entry.taps) == (8, 248070, (5, 19, 33, 47, 61))
    assert (entry.target_layers, entry.target_architecture) == (64, "qwen35")


@pytest.mark.parametrize("key", ["kimi-k2.5", "glm-5.3-flash", "laguna-s-2.1", "laguna-xs-2.1"])
def test_targets_that_publish_nothing_cannot_run_and_the_reason_names_them(key):
    entry = resolve(key)
    assert entry.target_architecture not in TAPPABLE_ARCHITECTURES
    assert entry.target_architecture in entry.stock_obstacle
    found = next(one for one in availability() if one.entry == entry)
    assert (found.here, found.reason) == (False, entry.stock_obstacle)


def test_every_other_pair_runs_on_the_library_at_hand():
    here = {one.entry.key for one in availability() if one.here}
    assert here == {entry.key for entry in registry() if entry.stock_obstacle is None}
    assert len(here) == 11


def test_what_converts_is_told_apart_from_what_runs():
    by_answer = {}
    for entry in registry():
        by_answer.setdefault(entry.converts, []).append(entry.key)
    assert by_answer["no"] == ["gpt-oss-20b", "gpt-oss-120b", "laguna-s-2.1", "laguna-xs-2.1"]
    assert by_answer["with-option"] == ["mimo-v2.5-pro", "nemotron-3.5-lightning-30b-a3b"]
    assert resolve("nemotron-3.5-lightning-30b-a3b").block_size is None
    assert resolve("mimo-v2.5-pro").conversion.startswith("--rope-theta ")
    assert resolve("kimi-k2.5").stock_obstacle.startswith("llama.cpp publishes no layer inputs")
    found = next(one for one in availability() if one.entry.key == "gpt-oss-20b")
    assert found.here is False
    assert found.reason.startswith("it is not converted: its attention biases are not zero")


def test_list_as_json_has_every_field_of_every_entry():
    listed = json.loads(json.dumps(list_dict(availability())))
    assert listed["schema"] == "dflash2.list/1"
    wanted = {field.name for field in fields(RegistryEntry)} | {"runs_on_stock", "runs_here", "reason"}
    assert len(listed["pairs"]) == len(registry())
    for pair, entry in zip(listed["pairs"], registry(), strict=True):
        assert set(pair) == wanted
        assert (pair["key"], pair["taps"]) == (entry.key, list(entry.taps))
        assert pair["runs_on_stock"] is (entry.stock_obstacle is None)


@pytest.mark.parametrize("name", ["qwen3.8-27b", "QWEN3.8-27B", "Qwen3.8-27B-DFlash2", "incoai/Qwen3.8-27B-DFlash2"])
def test_names_resolve_in_any_case_with_or_without_the_owner(name):
    assert resolve(name).key == "qwen3.8-27b"


def test_other_names_do_not_resolve_and_similar_keys_are_offered():
    assert resolve("qwen3.8-27") is None
    assert resolve("") is None
    assert close_names("qwen3.8-27")[0] == "qwen3.8-27b"
    assert close_names("someone/Qwen3.8-27B-DFlash3")[0] == "qwen3.8-27b"
    assert close_names("a name like no other") == ()


def test_a_local_folder_of_the_name_goes_first(tmp_path, monkeypatch):
    (tmp_path / "qwen3.8-27b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("qwen3.8-27b") is None
    assert resolve("qwen3-8b").license == "mit"
