"""The tokenizer of a GGUF file, without its weights."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dflash2.errors import NativeError
from dflash2.native.batch import IntArray
from dflash2.native.loader import llama
from dflash2.native.log import captured_log

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_MAX_TEXT_BYTES = 1 << 24


class Tokenizer:
    """llama.cpp's own tokenizer for the vocabulary of one model."""

    def __init__(self, path: Path) -> None:
        """Load the vocabulary of the GGUF at `path`; raises NativeError if llama.cpp refuses it."""
        module, _ = llama()
        module.llama_backend_init()
        params = module.llama_model_default_params()
        params.vocab_only, params.n_gpu_layers = True, 0
        errors: list[str] = []
        with captured_log(lambda level, text: errors.append(text.strip()) if level == _LOG_ERROR else None):
            self._model = module.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            reason = errors[0].rstrip(".") if errors else "it does not say why"
            raise NativeError(f"llama.cpp cannot load the vocabulary of {path}: {reason}.")
        self._vocabulary = module.llama_model_get_vocab(self._model)
        if module.llama_vocab_type(self._vocabulary) == module.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise NativeError(f"{path} has no tokenizer that llama.cpp can run.")

    def tokenize(self, text: str) -> IntArray:
        """Token ids [n] of `text`, nothing added; names of special tokens count as plain text."""
        if self._model is None:
            raise NativeError("this tokenizer is closed; make a new one.")
        data = text.encode("utf-8", "replace")
        if len(data) > _MAX_TEXT_BYTES:
            raise NativeError(f"a text of {len(data)} bytes is tokenised in parts of at most {_MAX_TEXT_BYTES}.")
        module, _ = llama()
        room = len(data) + 8
        tokens = (module.llama_token * room)()
        n = module.llama_tokenize(self._vocabulary, data, len(data), tokens, room, False, False)
        if n < 0:
            raise NativeError(f"llama.cpp gave {-n} tokens for a text of {len(data)} bytes.")
        return np.frombuffer(tokens, np.int32, n).copy()

    def is_end(self, token: int) -> bool:
        """Whether `token` ends a text, or a message of a chat; raises NativeError for an id out of the vocabulary."""
        module, _ = llama()
        if self._model is None:
            raise NativeError("this tokenizer is closed; make a new one.")
        if not 0 <= token < module.llama_vocab_n_tokens(self._vocabulary):
            raise NativeError(f"token {token} is not in the vocabulary.")
        return bool(module.llama_vocab_is_eog(self._vocabulary, token))

    def close(self) -> None:
        """Free the vocabulary."""
        if self._model:
            llama()[0].llama_model_free(self._model)
            self._model = None
