"""Upstream's own tokenizer conversion: writes a GGUF file with the keys it gives a target's Hugging Face folder.

Usage: upstream_vocab.py SOURCE. Each line of stdin is a JSON list [FOLDER, PRE, OUT.gguf]; each is answered by one
line, empty or the error. PRE answers the question which pre-tokenizer it is: upstream knows trained ones by a hash.
"""

import sys
from pathlib import Path

from upstream_service import serve

source = Path(sys.argv[1])
sys.path[:0] = [str(source), str(source / "gguf-py")]

import conversion  # noqa: E402
import gguf  # noqa: E402
from conversion.base import ModelBase  # noqa: E402


def convert(folder: str, pre: str, output: str) -> None:
    config = ModelBase.load_hparams(Path(folder), False)
    config = {**config, **config.get("text_config", {})}
    base = conversion.get_model_class(config["architectures"][0])

    class Vocabulary(base):
        model_arch = base.model_arch

        def __init__(self) -> None:
            self.dir_model = Path(folder)
            self.hparams = config
            self.gguf_writer = gguf.GGUFWriter(output, "dflash")
            self.is_mistral_format = False
            self.origin_hf_arch = config["architectures"][0]
            self.is_moe = False

        def _create_vocab_sentencepiece(self):
            # Upstream imports sentencepiece before it looks whether there is a model for it.
            if not (self.dir_model / "tokenizer.model").is_file():
                raise FileNotFoundError
            return super()._create_vocab_sentencepiece()

        def get_vocab_base_pre(self, _tokenizer) -> str:
            return pre

    vocabulary = Vocabulary()
    vocabulary.set_vocab()
    writer = vocabulary.gguf_writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


serve(convert)
