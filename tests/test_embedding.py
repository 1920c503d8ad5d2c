"""Copies of the target's embeddings and head in a drafter: the same bytes, the same drafts."""

from pathlib import Path

import numpy as np
import pytest
from factories import HIDDEN, MASK_TOKEN, VOCAB, drafter_config, drafter_tensors, make_drafter, make_target
from factories import write_checkpoint as write
from factories_carry import changed_gguf, encoded, random_head, random_nvfp4, random_q6_k, tensor_bytes, types_of
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from dflash2 import DFlashLlama
from dflash2.converter import DraftVocabulary, convert
from dflash2.converter.carried.carry import carry
from dflash2.converter.carried.embedding import (
    EMBEDDING,
    HEAD,
    GGUFRows,
    SelectedRows,
    TargetTables,
    embedding_with_mask_row,
    read_tables,
)
from dflash2.converter.encoding import chunks, encode
from dflash2.converter.outtypes import parse_outtype
from dflash2.converter.plan import PlannedTensor, TensorPlan
from dflash2.converter.sources import Computed
from dflash2.converter.type_plan import plan_types
from dflash2.errors import CheckpointError, GGUFError, TargetMismatchError, UnsupportedCheckpointError
from dflash2.gguf_info import read_gguf_info

_Type = GGMLQuantizationType
WIDE = 256  # a hidden size that K-quants can store


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return make_target(tmp_path / "tied.gguf")


@pytest.fixture
def untied(tmp_path: Path, tied: Path) -> Path:
    return changed_gguf(tied, tmp_path / "untied.gguf", {HEAD: random_head(VOCAB, HIDDEN)})


def cycles_of(target: Path, drafter: Path) -> list:
    """What is drafted after random prompts, cycle by cycle."""
    llm = DFlashLlama(target, drafter, depth=None, n_ctx=128, n_threads=1, auto_disable=False, verbose=False)
    cycles = []
    llm.on_cycle = cycles.append
    for prompt in np.random.default_rng(0).integers(2, VOCAB, (16, 12)).tolist():
        stream = llm.generate(prompt, temp=0.0)
        for _ in range(4):
            next(stream)
        stream.close()
    llm.close()
    return cycles


def contents(path: Path, *names: str) -> list[bytes]:
    info = read_gguf_info(path)
    return [tensor_bytes(info, name).tobytes() for name in names]


@pytest.mark.parametrize("outtype", ["f32", "q8_0", "q4_k_m"])
def test_an_untied_target_gives_embeddings_and_head_bit_for_bit_in_its_own_types(tmp_path, tied, outtype):
    head = random_head(VOCAB, HIDDEN, _Type.Q5_0)
    target = changed_gguf(tied, tmp_path / "target.gguf", {HEAD: head})
    done = convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", outtype=outtype, embed_target_head=True)
    assert contents(done.output, EMBEDDING, HEAD) == contents(target, EMBEDDING, HEAD)
    kinds = types_of(done.output)
    assert (kinds[EMBEDDING], kinds[HEAD]) == ("Q8_0", "Q5_0")
    assert done.notes[0] == (
        "Carries the target's embeddings and head, bytes as they are; use it with this target alone."
    )


@pytest.mark.parametrize("kind", [_Type.Q5_0, _Type.NVFP4])
def test_llama_cpps_quantiser_leaves_a_trimmed_head_and_its_tokens_alone(tmp_path, tied, kind):
    head = random_nvfp4(VOCAB, HIDDEN) if kind is _Type.NVFP4 else random_head(VOCAB, HIDDEN, kind)
    target = changed_gguf(tied, tmp_path / "target.gguf", {HEAD: head})
    words = tmp_path / "counts.txt"
    words.write_text("100 1\n200 1\n")
    vocabulary = DraftVocabulary(4, (words,))
    done = convert(make_drafter(tmp_path / "d"), target, tmp_path / "o.gguf", outtype="q4_k_m", draft_vocab=vocabulary)
    kinds = types_of(done.output)
    assert contents(done.output, HEAD)[0] == head[0][[0, 1, 100, 200]].tobytes()
    assert np.frombuffer(contents(done.output, "d2t")[0], np.int64).tolist() == [0, 1, 100, 200]
    assert (kinds[HEAD], kinds["d2t"], kinds["blk.0.attn_q.weight"]) == (kind.name, "I64", "Q5_0")


def test_a_tied_target_gives_one_table_that_the_loader_ties_again(tmp_path, tied):
    done = convert(make_drafter(tmp_path / "d"), tied, tmp_path / "out.gguf", embed_target_head=True)
    assert contents(done.output, EMBEDDING) == contents(tied, EMBEDDING)
    assert HEAD not in types_of(done.output)
    assert "embeddings (also its head)" in done.notes[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_drafts_with_copies_equal_those_with_shared_tensors(tmp_path, request, kind, version):
    target, checkpoint = request.getfixturevalue(kind), make_drafter(tmp_path / "d", version)
    shared = convert(checkpoint, target, tmp_path / "shared.gguf", outtype="f32").output
    copies = convert(checkpoint, target, tmp_path / "copies.gguf", outtype="f32", embed_target_head=True).output
    expected = cycles_of(target, shared)
    assert cycles_of(target, copies) == expected
    assert len({cycle.proposal for cycle in expected}) >= 8


@pytest.mark.parametrize(("make", "scales"), [(random_q6_k, ()), (random_nvfp4, ("output.scale",))])
def test_types_that_only_llama_cpp_writes_are_copied_with_their_scale(tmp_path, make, scales):
    tensors = {HEAD: make(VOCAB, WIDE)}
    tensors |= {name: (np.array([0.02], np.float32), _Type.F32) for name in scales}
    target = changed_gguf(make_target(tmp_path / "t.gguf", hidden=WIDE), tmp_path / "target.gguf", tensors)
    checkpoint = make_drafter(tmp_path / "d", hidden_size=WIDE)
    shared = convert(checkpoint, target, tmp_path / "shared.gguf", outtype="f32").output
    copies = convert(checkpoint, target, tmp_path / "copies.gguf", outtype="f32", embed_target_head=True).output
    assert contents(copies, HEAD, *scales) == contents(target, HEAD, *scales)
    assert cycles_of(target, copies) == cycles_of(target, shared)


def split(target: Path, folder: Path) -> Path:
    """The same target in several files, its shared tensors not in the first."""
    folder.mkdir()
    info = read_gguf_info(target)
    last = {name: (tensor_bytes(info, name).reshape(VOCAB, -1), _Type.Q8_0) for name in (EMBEDDING, HEAD)}
    first = changed_gguf(target, folder / "part.gguf", last, tensors_per_file=20)
    assert not {EMBEDDING, HEAD} & read_gguf_info(first).tensor_names
    return first


def test_tensors_of_a_split_target_are_found_in_its_other_files(tmp_path, untied):
    target = split(untied, tmp_path / "parts")
    done = convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", embed_target_head=True)
    assert contents(done.output, EMBEDDING, HEAD) == contents(untied, EMBEDDING, HEAD)


def test_a_missing_file_of_a_split_target_is_named(tmp_path, untied):
    target = split(untied, tmp_path / "parts")
    missing = sorted(target.parent.glob("*.gguf"))[-1]
    missing.unlink()
    with pytest.raises(GGUFError, match=f"^{missing} is missing: the target is split into 3 files; put them into one"):
        convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", embed_target_head=True)
    assert not (tmp_path / "out.gguf").exists()


def test_a_renamed_split_target_is_refused(tmp_path, untied):
    target = split(untied, tmp_path / "parts")
    renamed = target.rename(target.with_name("first.gguf"))
    with pytest.raises(GGUFError, match=r"but is not named \.\.\.-00001-of-00003\.gguf"):
        convert(make_drafter(tmp_path / "d"), renamed, tmp_path / "out.gguf", embed_target_head=True)


def test_an_output_in_place_of_another_file_of_the_target_is_refused(tmp_path, untied):
    target = split(untied, tmp_path / "parts")
    second = sorted(target.parent.glob("*.gguf"))[1]
    before = second.read_bytes()
    with pytest.raises(Exception, match="it is an input of this conversion"):
        convert(make_drafter(tmp_path / "d"), target, second, embed_target_head=True)
    assert second.read_bytes() == before


def test_a_target_without_embeddings_is_refused(tmp_path):
    header_only = make_target(tmp_path / "target.gguf", architecture="llama")
    with pytest.raises(GGUFError, match=r"has no tensor 'token_embd\.weight'; give a GGUF of a whole language model"):
        convert(make_drafter(tmp_path / "d"), header_only, tmp_path / "out.gguf", embed_target_head=True)


def test_a_folder_has_no_tensors_to_copy(tmp_path):
    with pytest.raises(GGUFError, match="is a folder; embeddings and head are copied from the target's GGUF file"):
        read_tables(tmp_path, VOCAB, HIDDEN)


def test_a_head_of_another_shape_is_refused(tmp_path, tied):
    target = changed_gguf(tied, tmp_path / "target.gguf", {HEAD: random_head(VOCAB - 32, HIDDEN)})
    with pytest.raises(TargetMismatchError, match=r"'output\.weight' has shape \[256, 64\], the drafter needs \[288"):
        convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", embed_target_head=True)


def test_a_file_cut_short_while_it_is_read_is_named(untied):
    rows = read_tables(untied, VOCAB, HIDDEN).head_rows
    with untied.open("rb+") as file:
        file.truncate(rows.tensor.offset + 100)
    with pytest.raises(GGUFError, match=r"untied.gguf is truncated in tensor 'output.weight'; copy it again\.$"):
        rows.raw(0, 4)


def own_tables(tmp_path: Path, *names: str, **config: object) -> Path:
    settings = drafter_config(2, **config)
    random = np.random.default_rng(3)
    own = {name: random.normal(0, 0.1, (VOCAB, HIDDEN)).astype(np.float32) for name in names}
    return write(tmp_path / "own", settings, {**drafter_tensors(settings), **own}, dtype="F32")


def test_a_checkpoint_with_tables_of_its_own_keeps_them(tmp_path, untied):
    checkpoint = own_tables(tmp_path, "embed_tokens.weight", "lm_head.weight")
    alone = convert(checkpoint, untied, tmp_path / "alone.gguf", outtype="f32")
    asked = convert(checkpoint, untied, tmp_path / "asked.gguf", outtype="f32", embed_target_head=True)
    assert contents(asked.output, EMBEDDING, HEAD) == contents(alone.output, EMBEDDING, HEAD)
    assert "nothing was taken from the target" in asked.notes[-1]


def test_a_head_of_its_own_is_trimmed_instead_of_the_targets(tmp_path, untied):
    checkpoint = own_tables(tmp_path, "embed_tokens.weight", "lm_head.weight")
    words = tmp_path / "counts.txt"
    words.write_text("".join(f"{token} 1\n" for token in range(100, 130)))
    alone = convert(checkpoint, untied, tmp_path / "alone.gguf", outtype="f32").output
    vocabulary = DraftVocabulary(32, (words,))
    trimmed = convert(checkpoint, untied, tmp_path / "out.gguf", outtype="f32", draft_vocab=vocabulary).output
    whole = np.frombuffer(contents(alone, HEAD)[0], np.float32).reshape(VOCAB, HIDDEN)
    rows = np.frombuffer(contents(trimmed, HEAD)[0], np.float32).reshape(-1, HIDDEN)
    np.testing.assert_array_equal(rows, whole[[0, 1, *range(100, 130)]])
    assert contents(trimmed, EMBEDDING) == contents(alone, EMBEDDING)


def test_a_tied_table_of_its_own_is_the_head_that_is_trimmed(tmp_path, untied):
    checkpoint = own_tables(tmp_path, "embed_tokens.weight", tie_word_embeddings=True)
    words = tmp_path / "counts.txt"
    words.write_text("7 1\n")
    done = convert(checkpoint, untied, tmp_path / "out.gguf", outtype="f32", draft_vocab=DraftVocabulary(8, (words,)))
    embeddings = np.frombuffer(contents(done.output, EMBEDDING)[0], np.float32).reshape(VOCAB, HIDDEN)
    rows = np.frombuffer(contents(done.output, HEAD)[0], np.float32).reshape(-1, HIDDEN)
    np.testing.assert_array_equal(rows, embeddings[[0, 1, 2, 3, 4, 5, 6, 7]])


def test_a_head_that_is_trimmed_already_is_not_trimmed_again(untied):
    reduced = (
        PlannedTensor(HEAD, Computed(np.zeros((8, HIDDEN), np.float32), "head")),
        PlannedTensor("d2t", Computed(np.arange(8), "map")),
    )
    tables = read_tables(untied, VOCAB, HIDDEN)
    with pytest.raises(UnsupportedCheckpointError, match="leave --draft-vocab out"):
        carry(TensorPlan(reduced, ()), Path("drafter"), tables, whole=False, kept=np.arange(4))
    carried = carry(TensorPlan(reduced, ()), Path("drafter"), tables, whole=True)
    assert [tensor.name for tensor in carried.tensors] == [EMBEDDING, HEAD, "d2t"]
    assert carried.tensors[1:] == reduced


def test_selected_rows_are_those_rows(untied):
    head = read_tables(untied, VOCAB, HIDDEN).head_rows
    ids = np.array([0, 1, 2, 9, 100, 101, 287])
    chosen = SelectedRows(head, ids)
    assert chosen.shape == (7, HIDDEN)
    np.testing.assert_array_equal(chosen.rows(1, 5), head.rows(0, VOCAB)[ids[1:6]])
    np.testing.assert_array_equal(chosen.raw(0, 7).reshape(7, -1), head.raw(0, VOCAB).reshape(VOCAB, -1)[ids])


def encoded_bytes(source) -> tuple[str, bytes]:
    (tensor,) = plan_types([PlannedTensor(EMBEDDING, source)], parse_outtype("bf16"), ()).tensors
    return tensor.type.name, b"".join(encode(chunk).tobytes() for chunk in chunks(tensor))


@pytest.mark.parametrize("kind", [_Type.Q8_0, _Type.BF16, _Type.Q4_0])
def test_the_mask_row_is_replaced_and_every_other_row_keeps_its_bytes(tmp_path, tied, kind):
    table = encoded(np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32), kind)
    target = changed_gguf(tied, tmp_path / "target.gguf", {EMBEDDING: table})
    vector = np.random.default_rng(2).normal(size=HIDDEN).astype(np.float32)
    source = embedding_with_mask_row(read_tables(target, VOCAB, HIDDEN).embedding, MASK_TOKEN, vector)
    name, data = encoded_bytes(source)
    rows = np.frombuffer(data, np.uint8).reshape(VOCAB, -1)
    assert name == kind.name
    assert source.note is None
    others = np.arange(VOCAB) != MASK_TOKEN
    np.testing.assert_array_equal(rows[others], table[0][others])
    error = np.abs(dequantize(rows[[MASK_TOKEN]], kind)[0] - vector).max()
    assert error <= np.abs(vector).max() / {_Type.Q8_0: 250, _Type.BF16: 250, _Type.Q4_0: 7}[kind]


def test_a_table_whose_type_only_llama_cpp_writes_becomes_f16_for_the_mask_row(tmp_path):
    table = random_q6_k(VOCAB, WIDE)
    target = changed_gguf(make_target(tmp_path / "t.gguf", hidden=WIDE), tmp_path / "target.gguf", {EMBEDDING: table})
    vector = np.random.default_rng(2).normal(size=WIDE).astype(np.float32)
    source = embedding_with_mask_row(read_tables(target, VOCAB, WIDE).embedding, MASK_TOKEN, vector)
    name, data = encoded_bytes(source)
    expected = dequantize(*table).astype(np.float16)
    expected[MASK_TOKEN] = vector.astype(np.float16)
    np.testing.assert_array_equal(np.frombuffer(data, np.float16).reshape(VOCAB, WIDE), expected)
    assert name == "F16"
    assert source.note == (
        f"{target}: tensor 'token_embd.weight' is carried as F16, not Q6_K: the mask token's own row cannot be"
        " encoded as Q6_K here."
    )


@pytest.mark.parametrize("vector", [np.full(HIDDEN, np.nan), np.full(HIDDEN, 70000.0), np.zeros(HIDDEN + 1)])
def test_a_mask_row_that_does_not_fit_is_refused(tied, vector):
    with pytest.raises(CheckpointError, match=r"^the mask embedding has "):
        embedding_with_mask_row(read_tables(tied, VOCAB, HIDDEN).embedding, MASK_TOKEN, vector.astype(np.float32))


def test_a_tied_head_does_not_see_the_replaced_mask_row(tied):
    tables = read_tables(tied, VOCAB, HIDDEN)
    plan = carry(TensorPlan((), ()), Path("d"), tables, whole=False, mask_row=(1, np.ones(HIDDEN, np.float32)))
    embedding, head = (tensor.source for tensor in plan.tensors)
    np.testing.assert_array_equal(head.rows(1, 1), tables.embedding.rows(1, 1))
    np.testing.assert_array_equal(embedding.rows(1, 1), np.ones((1, HIDDEN)))
    np.testing.assert_array_equal(embedding.rows(2, 9), head.rows(2, 9))


def test_a_replaced_mask_row_drafts_as_a_target_with_that_row_does(tmp_path, untied):
    checkpoint = make_drafter(tmp_path / "d")
    shared = convert(checkpoint, untied, tmp_path / "shared.gguf", outtype="f32").output
    copies = convert(checkpoint, untied, tmp_path / "copies.gguf", outtype="f32", embed_target_head=True).output
    vector = np.random.default_rng(4).normal(0, 2, HIDDEN).astype(np.float32)
    source = embedding_with_mask_row(read_tables(untied, VOCAB, HIDDEN).embedding, MASK_TOKEN, vector)
    table = np.frombuffer(encoded_bytes(source)[1], np.uint8).reshape(VOCAB, -1), _Type.Q8_0
    replaced = changed_gguf(copies, tmp_path / "replaced.gguf", {EMBEDDING: table})
    other_target = changed_gguf(untied, tmp_path / "other.gguf", {EMBEDDING: table})
    expected = cycles_of(other_target, shared)
    assert cycles_of(untied, replaced) == expected
    assert cycles_of(untied, copies) != expected


def test_tables_name_every_file_they_are_read_from(untied):
    tables = read_tables(untied, VOCAB, HIDDEN)
    assert isinstance(tables, TargetTables)
    assert tables.files == (untied,)
    assert isinstance(tables.head, GGUFRows)
