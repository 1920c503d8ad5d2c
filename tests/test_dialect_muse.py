"""MuseGlimmerAssistantModel: a flat config, two names of its own, an inclusive window, no causality."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, make_f32_target  # noqa: E402
from factories import VOCAB, drafter_config  # noqa: E402
from factories_dialects import lively_tensors, muse_checkpoint, plain_drafter  # noqa: E402

from dflash2.converter import Overrides, convert  # noqa: E402
from dflash2.gguf_info import read_gguf_info  # noqa: E402

WINDOW = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def tensors():
    return lively_tensors(drafter_config(1))


CASES = {
    "sliding": ({}, (WINDOW + 1, WINDOW + 1)),
    "kinds left out": ({"layer_types": None}, (WINDOW + 1, WINDOW + 1)),
    "mixed": ({"layer_types": ["full_attention", "sliding_attention"]}, (None, WINDOW + 1)),
    "full": ({"layer_types": ["full_attention"] * 2}, (None, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference(tmp_path, target, tensors, case):
    changes, window = CASES[case]
    folder = muse_checkpoint(tmp_path / "drafter", tensors, sliding_window=WINDOW, **changes)
    reference = plain_drafter(drafter_config(1), tensors, window=window)
    conversion = assert_drafts_equal(target, folder, reference, tmp_path)
    assert conversion.notes == ()


def test_what_transformers_saves_is_converted(tmp_path, target, tensors):
    """The names and the config come from its own `save_pretrained`."""
    ours = muse_checkpoint(tmp_path / "ours", tensors, sliding_window=WINDOW)
    model = transformers.MuseGlimmerAssistantModel.from_pretrained(ours, dtype=torch.float32)
    model.config.vocab_size = VOCAB
    model.save_pretrained(tmp_path / "saved")
    reference = plain_drafter(drafter_config(1), tensors, window=(WINDOW + 1,) * 2)
    assert_drafts_equal(target, tmp_path / "saved", reference, tmp_path)


def test_user_may_drop_the_window(tmp_path, target, tensors):
    folder = muse_checkpoint(tmp_path / "drafter", tensors, sliding_window=WINDOW)
    output = tmp_path / "out.gguf"
    done = convert(folder, target.path, output, overrides=Overrides(sliding_window=False))
    metadata = read_gguf_info(output).metadata
    assert "dflash.attention.sliding_window" not in metadata
    assert metadata["dflash.attention.causal"] is False
    assert done.notes == ("By your choice: sliding layers get no window and keep their causality.",)
