"""`upgrade` rewrites metadata and nothing else: a fork's drafter becomes upstream's, byte for byte in its tensors."""

import stat

import pytest
from factories import make_drafter, make_target
from factories_check import data_section, edited_gguf, make_fork, tensor_bytes, with_key
from gguf import GGUFReader
from gguf.constants import GGUFValueType

from dflash2.converter import check, convert, inspect, upgrade
from dflash2.errors import GGUFError, OutputError, TargetMismatchError
from dflash2.gguf_info import ValueType, read_gguf_info

I32_ARRAY = ValueType(GGUFValueType.ARRAY, GGUFValueType.INT32)


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def converted(tmp_path, target):
    return convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "converted.gguf", outtype="q8_0").output


@pytest.mark.parametrize("spelling", ["flat", "dotted"])
def test_a_fork_becomes_what_conversion_writes(tmp_path, converted, spelling):
    fork = make_fork(converted, tmp_path / "fork.gguf", spelling)
    done = upgrade(fork, tmp_path / "new.gguf")
    new, wanted = read_gguf_info(done.output), read_gguf_info(converted)
    assert dict(new.metadata) == dict(wanted.metadata)
    assert dict(new.value_types) == dict(wanted.value_types)
    assert tensor_bytes(done.output) == tensor_bytes(converted)
    assert data_section(done.output) == data_section(fork)
    assert done.n_bytes == done.output.stat().st_size


def test_changes_name_every_key_and_tensor(tmp_path, converted):
    done = upgrade(make_fork(converted, tmp_path / "fork.gguf"), tmp_path / "new.gguf")
    changes = {change.what: (change.old, change.new) for change in done.changes}
    assert changes["general.architecture"] == ("dflash-draft", "dflash")
    assert changes["dflash-draft.dflash.target_layer_ids"] == (
        "dflash-draft.dflash.target_layer_ids = [0, 2, 3]",
        "dflash.target_layers = [1, 3, 4]",
    )
    assert changes["tensor dflash_fc.weight"] == ("dflash_fc.weight", "fc.weight")
    assert changes["tensor blk.1.post_attention_norm.weight"][1] == "blk.1.ffn_norm.weight"


def test_a_file_of_upstream_needs_nothing_and_nothing_is_written(tmp_path, converted, target):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = upgrade(converted, tmp_path / "new.gguf", target=target)
    assert (done.output, done.changes) == (None, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_second_upgrade_does_nothing_so_taps_are_shifted_once(tmp_path, converted):
    first = upgrade(make_fork(converted, tmp_path / "fork.gguf"), tmp_path / "new.gguf")
    assert upgrade(first.output, tmp_path / "again.gguf").output is None
    assert inspect(first.output).drafter.taps == (1, 3, 4)


def test_taps_of_upstream_cannot_be_shifted_on_request(tmp_path, converted):
    with pytest.raises(GGUFError, match="never shifted again"):
        upgrade(converted, tmp_path / "new.gguf", tap_shift=1)


def test_shifted_taps_of_a_fork_can_be_kept(tmp_path, converted):
    done = upgrade(make_fork(converted, tmp_path / "fork.gguf"), tmp_path / "new.gguf", tap_shift=0)
    assert inspect(done.output).drafter.taps == (0, 2, 3)


@pytest.mark.parametrize(("shift", "taps"), [(0, (0, 2, 3)), (1, (1, 3, 4))])
def test_an_early_file_needs_the_shift_from_its_user(tmp_path, converted, shift, taps):
    early = make_fork(converted, tmp_path / "early.gguf", "early")
    with pytest.raises(GGUFError, match=r"'dflash\.target_layer_ids' \[0, 2, 3\] may count layers either way"):
        upgrade(early, tmp_path / "new.gguf")
    assert not (tmp_path / "new.gguf").exists()
    assert inspect(upgrade(early, tmp_path / "new.gguf", tap_shift=shift).output).drafter.taps == taps


def test_missing_rope_sections_are_added_for_an_mrope_target(tmp_path, converted):
    mrope = make_target(tmp_path / "mrope.gguf", architecture="qwen35", mrope=True)
    done = upgrade(converted, tmp_path / "new.gguf", target=mrope)
    info = read_gguf_info(done.output)
    assert info.metadata["dflash.rope.dimension_sections"] == (8, 0, 0, 0)
    assert info.value_types["dflash.rope.dimension_sections"] == I32_ARRAY
    assert [change.what for change in done.changes] == ["dflash.rope.dimension_sections"]
    assert data_section(done.output) == data_section(converted)


def test_mask_token_is_written_where_it_is_missing_and_never_changed(tmp_path, converted):
    bare = edited_gguf(converted, tmp_path / "bare.gguf", without=("tokenizer.ggml.mask_token_id",))
    done = upgrade(bare, tmp_path / "new.gguf", mask_token_id=1)
    assert inspect(done.output).drafter.mask_token_id == 1
    with pytest.raises(GGUFError, match="names the mask token 1, not 2"):
        upgrade(converted, tmp_path / "other.gguf", mask_token_id=2)
    with pytest.raises(GGUFError, match="the mask token 288 is outside its vocabulary"):
        upgrade(bare, tmp_path / "other.gguf", mask_token_id=288)


@pytest.mark.parametrize("causal", [True, False])
def test_causality_of_sliding_layers_is_written_on_request_only(tmp_path, converted, causal):
    done = upgrade(converted, tmp_path / "new.gguf", causal_swa=causal)
    assert read_gguf_info(done.output).metadata["dflash.attention.causal_swa"] is causal
    assert inspect(done.output).drafter.attention.causal_sliding is causal


def test_missing_value_length_is_that_of_keys_of_the_same_shape(tmp_path, converted):
    bare = edited_gguf(converted, tmp_path / "bare.gguf", without=("dflash.attention.value_length",))
    done = upgrade(bare, tmp_path / "new.gguf")
    assert read_gguf_info(done.output).metadata["dflash.attention.value_length"] == 16


def test_another_models_target_is_refused(tmp_path, converted):
    with pytest.raises(TargetMismatchError, match="hidden size 128"):
        upgrade(converted, tmp_path / "new.gguf", target=make_target(tmp_path / "wide.gguf", hidden=128))
    with pytest.raises(TargetMismatchError, match="has 280 tokens"):
        upgrade(converted, tmp_path / "new.gguf", target=make_target(tmp_path / "short.gguf", vocab=280))


def test_alignment_other_than_the_default_is_kept(tmp_path, converted):
    fork = make_fork(converted, tmp_path / "fork.gguf", alignment=128)
    done = upgrade(fork, tmp_path / "new.gguf")
    assert GGUFReader(done.output).alignment == 128
    assert data_section(done.output) == data_section(fork)
    assert tensor_bytes(done.output) == tensor_bytes(converted)


def test_output_must_be_another_file_unless_in_place(tmp_path, converted):
    fork = make_fork(converted, tmp_path / "fork.gguf")
    before = fork.read_bytes()
    with pytest.raises(OutputError, match="name the file to write with -o, or replace it with --in-place"):
        upgrade(fork)
    with pytest.raises(OutputError, match="it is the file to upgrade"):
        upgrade(fork, fork)
    assert fork.read_bytes() == before
    with pytest.raises(OutputError, match="leave out the output"):
        upgrade(fork, tmp_path / "new.gguf", in_place=True)


def test_in_place_keeps_mode_and_link(tmp_path, converted):
    fork = make_fork(converted, tmp_path / "fork.gguf")
    fork.chmod(0o640)
    link = tmp_path / "link.gguf"
    link.symlink_to(fork)
    done = upgrade(link, in_place=True)
    assert done.output == fork
    assert link.is_symlink()
    assert stat.S_IMODE(fork.stat().st_mode) == 0o640
    assert tensor_bytes(fork) == tensor_bytes(converted)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_what_is_no_drafter_is_refused(tmp_path, target, converted):
    with pytest.raises(GGUFError, match="is a qwen3 model, no DFlash drafter"):
        upgrade(target, tmp_path / "new.gguf")
    part = edited_gguf(converted, tmp_path / "part.gguf", set_keys=with_key("split.count", 2, GGUFValueType.UINT16))
    with pytest.raises(GGUFError, match="one part of a split GGUF"):
        upgrade(part, tmp_path / "new.gguf")
    dspark = make_fork(converted, tmp_path / "dspark.gguf")
    marked = edited_gguf(
        dspark, tmp_path / "marked.gguf", set_keys=with_key("dflash-draft.dspark.markov_rank", 8, GGUFValueType.UINT32)
    )
    with pytest.raises(GGUFError, match="DSpark drafter"):
        upgrade(marked, tmp_path / "new.gguf")


def test_upgraded_fork_of_the_demo_drafter_drafts_as_before(tmp_path, demo, drafter_gguf):
    """The library loads it, and greedy drafts are those of the converted file."""
    from dflash2 import DFlashLlama

    fork = make_fork(drafter_gguf, tmp_path / "fork.gguf")
    done = upgrade(fork, tmp_path / "new.gguf", target=demo.target)
    assert check(done.output, demo.target).passes(strict=True)
    seen = []
    for path in (drafter_gguf, done.output):
        llm = DFlashLlama(demo.target, path, depth=None, n_ctx=256, n_threads=1, verbose=False)
        text = llm(demo.prompts[0], max_tokens=48, temperature=0)["choices"][0]["text"]
        seen.append((text, llm.stats.cycles, llm.stats.accepted))
        llm.close()
    assert seen[0] == seen[1]
    assert seen[0][2] > 0


def test_progress_ends_with_the_whole_data(tmp_path, converted):
    calls = []
    fork = make_fork(converted, tmp_path / "fork.gguf")
    upgrade(fork, tmp_path / "new.gguf", progress=lambda done, total: calls.append((done, total)))
    size = len(data_section(fork))
    assert calls[-1] == (size, size)


def test_systems_without_copies_in_the_kernel_copy_through_memory(tmp_path, converted, monkeypatch):
    monkeypatch.delattr("os.copy_file_range", raising=False)
    fork = make_fork(converted, tmp_path / "fork.gguf")
    done = upgrade(fork, tmp_path / "new.gguf")
    assert data_section(done.output) == data_section(fork)
