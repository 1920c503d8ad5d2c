"""Ollama Modelfiles for a target and its drafter, and how other engines start them."""

from dflash2.modelfiles.launch import Launch, launch
from dflash2.modelfiles.recipe_pair import PairNameError, PairNames, pair_names
from dflash2.modelfiles.recipes import RECIPES, Recipe, close_engines, recipe

__all__ = [
    "RECIPES",
    "Launch",
    "PairNameError",
    "PairNames",
    "Recipe",
    "close_engines",
    "launch",
    "pair_names",
    "recipe",
]
