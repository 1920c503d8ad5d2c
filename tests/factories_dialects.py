"""Tiny random checkpoints of each published layout; their weights are the z-lab ones under that layout's names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from factories import drafter_config, drafter_tensors, write_checkpoint
from safetensors.numpy import save_file


def lively_tensors(config: Mapping, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a z-lab `config` large enough that every rule of a dialect shows: norms near 1, sharp attention."""
    random = np.random.default_rng(seed + 1000)
    tensors = drafter_tensors(config, seed)
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            sharp = 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            tensors[name] = (sharp + random.normal(0, 0.2, values.shape)).astype(np.float32)
    return tensors


def plain_drafter(config: Mapping, tensors: Mapping[str, np.ndarray], **rules: object):
    """The PyTorch side of a z-lab `config`: its sizes, every layer bidirectional and without a window unless said."""
    import torch
    from plain_drafter import PlainDrafter, Rules

    draft = {**config, **config["dflash_config"]}
    layers = config["num_hidden_layers"]
    stated = {
        "taps": tuple(draft["target_layer_ids"]),
        "causal": (False,) * layers,
        "window": (None,) * layers,
        "theta": config["rope_theta"],
        "top_k": draft.get("selector_top_k", 0),
        **rules,
    }
    sizes = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    settings = Rules(*sizes, block=draft["block_size"], mask_token=draft["mask_token_id"], **stated)
    return PlainDrafter(settings, {name: torch.from_numpy(values) for name, values in tensors.items()})


def muse_config(**changes: object) -> dict:
    """A flat MuseGlimmerAssistantModel config, as transformers writes it."""
    drafter = drafter_config(1)
    kept = (
        "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "sliding_window",
        "vocab_size",
    )  # fmt: skip
    return {
        **{key: drafter[key] for key in kept},
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "rope_parameters": {"rope_theta": drafter["rope_theta"], "rope_type": "default"},
        **drafter["dflash_config"],
        **changes,
    }


def muse_checkpoint(folder: Path, tensors: Mapping[str, np.ndarray], **changes: object) -> Path:
    """A MuseGlimmerAssistantModel around z-lab `tensors` of version 1."""
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    renamed = {names.get(name, name): values for name, values in tensors.items()}
    return write_checkpoint(folder, muse_config(**changes), renamed, dtype="F32")


def nemo_config(version: int = 2, **changes: object) -> dict:
    """The config that NeMo AutoModel stamps: block size at both levels, identity scales, `is_causal` false."""
    config = drafter_config(version, **changes)
    if "architectures" not in changes:
        config["architectures"] = ["Qwen3DFlash2DraftModel" if version == 2 else "Qwen3DFlashDraftModel"]
    config["dflash_config"] = {
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
        **config["dflash_config"],
    }
    return config


def speculators_config(version: int = 1, drafter: Mapping | None = None, **changes: object) -> dict:
    """A config of speculators 0.9.0 that says what the z-lab config `drafter` says."""
    drafter = dict(drafter or drafter_config(version))
    draft = drafter.pop("dflash_config")
    kept = (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "sliding_window", "use_sliding_window", "vocab_size",
    )  # fmt: skip
    kind = "dflash2" if version == 2 else "dflash"
    config = {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somewhere/target"}},
        "transformer_layer_config": {
            **{key: drafter[key] for key in kept},
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": drafter["rope_theta"], "rope_type": "default"},
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in draft["target_layer_ids"]],
        "block_size": draft["block_size"],
        "draft_vocab_size": drafter["vocab_size"],
        "mask_token_id": draft["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": version == 2,
        "target_hidden_size": None,
    }
    if version == 2:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        config |= {name: draft[name] for name in names}
    return {**config, **changes}


def speculators_checkpoint(
    folder: Path, config: Mapping, tensors: Mapping[str, np.ndarray], ids: Sequence[int] | None = None
) -> Path:
    """One file of F32 tensors; with `ids`, the maps of a vocabulary reduced to them: offsets d2t, members t2d."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    held = dict(tensors)
    if ids is not None:
        members = np.zeros(config["transformer_layer_config"]["vocab_size"], bool)
        members[list(ids)] = True
        held |= {"d2t": np.array(ids, np.int64) - np.arange(len(ids)), "t2d": members}
    save_file(held, folder / "model.safetensors")
    return folder
