"""Drafters that are refused by name, each with what to do instead."""

import pytest
from factories import drafter_config, drafter_tensors, make_target, write_checkpoint

from dflash2.converter import convert
from dflash2.errors import UnsupportedCheckpointError

INSTEAD = "draft with a DFlash or DFlash 2 drafter of the same target"
DSPARK = (
    "is a DSpark drafter, another method with a Markov head; convert it with upstream's converter and run it with"
    " upstream's draft-dspark."
)
DOMINO = f"is a Domino drafter, whose GRU head corrects the logits token by token; {INSTEAD}."
CASES = {
    "Qwen3DSparkModel": DSPARK,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "DominoDraftModel": DOMINO,
    "Qwen3DominoModel": DOMINO,
    "DFlashLagunaForCausalLM": (
        "cannot be kept: its attention output gate (g_proj) and its norm of each tap before fc (aux_hidden_norms) have"
        f" no place in llama.cpp's dflash graph; {INSTEAD}, or serve it with vLLM."
    ),
    "KimiK3DFlashDraftModel": f"has latent attention (MLA), which llama.cpp's dflash graph lacks; {INSTEAD}.",
}


@pytest.mark.parametrize("architecture", CASES)
def test_refused_by_name_with_what_to_use_instead(tmp_path, architecture):
    config = drafter_config(1, architectures=[architecture])
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    target = make_target(tmp_path / "target.gguf")
    with pytest.raises(UnsupportedCheckpointError) as refused:
        convert(folder, target, tmp_path / "out.gguf")
    assert str(refused.value) == f"{folder}/config.json: {architecture} {CASES[architecture]}"
    assert not (tmp_path / "out.gguf").exists()
