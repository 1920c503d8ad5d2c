"""Ollama Modelfiles for a target and its drafter, Ollama's runner, and how other engines start them."""

from dflash2.modelfiles.launch import Launch, launch
from dflash2.modelfiles.recipe_pair import PairNameError, PairNames, pair_names
from dflash2.modelfiles.recipes import RECIPES, Recipe, close_engines, recipe
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = [
    "RECIPES",
    "Launch",
    "PairNameError",
    "PairNames",
    "Recipe",
    "ServerProbe",
    "close_engines",
    "launch",
    "pair_names",
    "probe_server",
    "recipe",
]
