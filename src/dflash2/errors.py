"""Every error of this package: one sentence that says what is wrong, where, and what to do."""


class Dflash2Error(Exception):
    """Base of all errors raised on purpose; the commands print its message and exit with status 1."""


class CheckpointError(Dflash2Error):
    """A drafter checkpoint (config.json, safetensors) cannot be read or is not what it claims to be."""


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint is well formed but asks for something that cannot be converted faithfully."""


class TargetMismatchError(Dflash2Error):
    """Drafter and target do not belong together (hidden size, vocabulary, taps)."""


class GGUFError(Dflash2Error):
    """A GGUF file cannot be read, or lacks what is needed from it."""


class HubError(Dflash2Error):
    """A model cannot be had from the Hub or its cache."""


class DraftVocabularyError(Dflash2Error):
    """The tokens of a trimmed head cannot be chosen from what was given."""


class OptionError(Dflash2Error):
    """An option of a call has a value that it cannot have."""


class RecipeError(Dflash2Error):
    """No launch command can be given: the engine cannot run the pair, or too little is known of it."""


class ModelfileError(Dflash2Error):
    """A Modelfile cannot be read, in Ollama's own words, or something cannot be written into one."""


class OutputError(Dflash2Error):
    """An output file cannot be written."""


class NativeError(Dflash2Error):
    """The llama.cpp library is missing, lacks a symbol, or refused a call."""


class SamplingError(Dflash2Error, RuntimeError):
    """No token can be chosen: a grammar or a logits processor forbids all of them."""


class EvidenceError(Dflash2Error):
    """Something to measure or compare cannot be had: a result file, a data set, a server."""


class BuildError(Dflash2Error):
    """Building llama.cpp from its pinned source failed."""


class ServerError(Dflash2Error):
    """A `llama-server` cannot be found or started, or has ended by itself."""


class PatchError(BuildError):
    """The patch series cannot be applied to a tree of llama.cpp, or removed from it."""


class RunnerError(Dflash2Error):
    """Ollama's folder is not as expected, or the server to put there does not do what Ollama asks of it."""


class OllamaError(Dflash2Error):
    """An Ollama server cannot be reached, refuses what is asked, or has not done it."""


class OllamaBrokenError(OllamaError):
    """The connection to an Ollama server broke."""


class OllamaDigestError(OllamaError):
    """An Ollama server got other bytes than those that were announced."""


class ContextLimitError(Dflash2Error, RuntimeError):
    """A token does not fit into the context any more; a RuntimeError too, as llama_cpp raises there."""


class EmptyPromptError(Dflash2Error, AssertionError):
    """There is no token to continue; an AssertionError too, as llama_cpp raises there."""


class UnsupportedCallError(Dflash2Error, RuntimeError):
    """A method of `Llama` that is not offered with a drafter; a RuntimeError too, as llama_cpp raises there."""


class PretrainedError(HubError, ValueError):
    """`from_pretrained` found no file of that name, or several; a ValueError too, as llama_cpp raises there."""
