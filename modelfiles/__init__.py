"""Ollama Modelfiles for a target and its drafter, the files that every engine is given, and how engines start them."""

from dflash2.modelfiles.editing import set_values
from dflash2.modelfiles.folders import Folders, check_folders, resolve_folders
from dflash2.modelfiles.grammar import ROLES, Command
from dflash2.modelfiles.launch import Launch, launch
from dflash2.modelfiles.modelfile import Modelfile
from dflash2.modelfiles.ollama_create import (
    DRAFT_QUANTIZATIONS,
    OLD_LLAMA_CPP,
    Route,
    check_draft_quantization,
    check_settings,
    compose,
    create_arguments,
    left_behind,
    model_name,
    route_notes,
    shell_lines,
)
from dflash2.modelfiles.pairs import ModelFile, Pair, check_pair, resolve_pair
from dflash2.modelfiles.parameters import DRAFT_NUM_PREDICT, NUM_CTX, STOP
from dflash2.modelfiles.recipe_pair import PairNameError, PairNames, pair_names
from dflash2.modelfiles.recipes import RECIPES, Recipe, close_engines, recipe
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

__all__ = [
    "DRAFT_NUM_PREDICT",
    "DRAFT_QUANTIZATIONS",
    "NUM_CTX",
    "OLD_LLAMA_CPP",
    "RECIPES",
    "ROLES",
    "STOP",
    "Command",
    "Folders",
    "Launch",
    "ModelFile",
    "Modelfile",
    "Pair",
    "PairNameError",
    "PairNames",
    "Recipe",
    "Route",
    "ServerProbe",
    "check_draft_quantization",
    "check_folders",
    "check_pair",
    "check_settings",
    "close_engines",
    "compose",
    "create_arguments",
    "launch",
    "left_behind",
    "model_name",
    "pair_names",
    "probe_server",
    "recipe",
    "resolve_folders",
    "resolve_pair",
    "route_notes",
    "set_values",
    "shell_lines",
]
