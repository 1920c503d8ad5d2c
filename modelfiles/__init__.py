"""Ollama Modelfiles for a target and its drafter, the files that every engine is given, and how engines start them."""

from dflash2.modelfiles.editing import set_values
from dflash2.modelfiles.grammar import Command
from dflash2.modelfiles.launch import Launch, launch
from dflash2.modelfiles.modelfile import Modelfile
from dflash2.modelfiles.pairs import ModelFile, Pair, check_pair, resolve_pair
from dflash2.modelfiles.recipe_pair import PairNameError, PairNames, pair_names
from dflash2.modelfiles.recipes import RECIPES, Recipe, close_engines, recipe
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = [
    "RECIPES",
    "Command",
    "Launch",
    "ModelFile",
    "Modelfile",
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
    "set_values",
]
