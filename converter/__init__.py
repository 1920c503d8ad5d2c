"""Hugging Face drafter checkpoint to GGUF, and what a GGUF file says about itself."""

from dflash2.converter.carried.draft_vocabulary import DraftVocabulary
from dflash2.converter.checking.checkpoint_facts import CheckpointFacts
from dflash2.converter.checking.drafter_facts import DrafterFacts, RopeFacts
from dflash2.converter.checking.findings import Finding
from dflash2.converter.checking.inspection import Inspection, Shard, TypeUse, inspect
from dflash2.converter.checking.pairing import Report, check
from dflash2.converter.checking.registry import (
    Availability,
    RegistryEntry,
    availability,
    close_names,
    list_dict,
    resolve,
)
from dflash2.converter.checking.upgrade import Change, Upgrade, upgrade
from dflash2.converter.config import Attention, Convolution, DrafterConfig, Rope, RopeScaling, Selector
from dflash2.converter.conversion import Conversion, convert
from dflash2.converter.dialects.layout import refuse_gguf
from dflash2.converter.dialects.overrides import Overrides, TapIds, VocabularyMap
from dflash2.converter.outtypes import DIRECT_TYPES, OUT_TYPES, TENSOR_TYPES

__all__ = [
    "DIRECT_TYPES",
    "OUT_TYPES",
    "TENSOR_TYPES",
    "Attention",
    "Availability",
    "Change",
    "CheckpointFacts",
    "Conversion",
    "Convolution",
    "DraftVocabulary",
    "DrafterConfig",
    "DrafterFacts",
    "Finding",
    "Inspection",
    "Overrides",
    "RegistryEntry",
    "Report",
    "Rope",
    "RopeFacts",
    "RopeScaling",
    "Selector",
    "Shard",
    "TapIds",
    "TypeUse",
    "Upgrade",
    "VocabularyMap",
    "availability",
    "check",
    "close_names",
    "convert",
    "inspect",
    "list_dict",
    "refuse_gguf",
    "resolve",
    "upgrade",
]
