"""Upstream's own converter as a small service; the tokenizer comes from a target GGUF instead of a model folder.

Usage: upstream_convert.py SOURCE, where SOURCE is a llama.cpp source tree. Each line of stdin is a JSON list
[DRAFTER, TARGET.gguf, OUT.gguf, OUTTYPE]; each is answered by one line, empty or the error. With an empty TARGET.gguf
no tokenizer is written.
A process of its own, because that tree brings its own gguf package.
"""

import json
import sys
import tempfile
from pathlib import Path

from upstream_service import serve

source = Path(sys.argv[1])
sys.path[:0] = [str(source), str(source / "gguf-py")]

import conversion  # noqa: E402
import gguf  # noqa: E402

FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def convert(drafter: str, target: str, output: str, outtype: str) -> None:
    fields = gguf.GGUFReader(target).fields if target else {}
    base = conversion.get_model_class(json.loads(Path(drafter, "config.json").read_text())["architectures"][0])

    class Converter(base):
        model_arch = base.model_arch

        def set_vocab(self) -> None:
            for key, entry in fields.items():
                if key.startswith("tokenizer.") and key != "tokenizer.ggml.mask_token_id":
                    element = entry.types[-1] if len(entry.types) > 1 else None
                    self.gguf_writer.add_key_value(key, entry.contents(), entry.types[0], element)
            mask = self.hparams.get("dflash_config", {}).get("mask_token_id")
            if mask is not None:
                self.gguf_writer.add_mask_token_id(mask)

    with tempfile.TemporaryDirectory() as folder:
        # Upstream asks the target's config.json whether it uses M-RoPE.
        sections = [key for key in fields if key.endswith(".rope.dimension_sections")]
        rope = {"mrope_section": [1, 1, 1]} if sections else {}
        Path(folder, "config.json").write_text(json.dumps({"rope_parameters": rope}))
        Converter(Path(drafter), FILE_TYPES[outtype], Path(output), target_model_dir=Path(folder)).write()


serve(convert)
