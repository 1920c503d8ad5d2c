"""A pair for Ollama and for llama.cpp's server: from what a user names to files that run."""

from dflash2.modelfiles.pairs import ModelFile, Pair, check_pair, resolve_pair
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = ["ModelFile", "Pair", "ServerProbe", "check_pair", "probe_server", "resolve_pair"]
