"""A pair for Ollama, for llama.cpp's server and for other engines: from what a user names to what runs."""

from dflash2.modelfiles.launch import Launch, launch
from dflash2.modelfiles.pairs import ModelFile, Pair, check_pair, resolve_pair
from dflash2.modelfiles.recipe_pair import PairNameError, PairNames, pair_names
from dflash2.modelfiles.recipes import RECIPES, Recipe, close_engines, recipe
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = [
    "RECIPES",
    "Launch",
    "ModelFile",
    "Pair",
    "PairNameError",
    "PairNames",
    "Recipe",
    "ServerProbe",
    "check_pair",
    "close_engines",
    "launch",
    "pair_names",
    "probe_server",
    "recipe",
    "resolve_pair",
]
