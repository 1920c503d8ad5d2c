"""Everything in llama.cpp that a user of `DFlashLlama` could run into and that would kill the interpreter, as a table.

Each case is a pair, perhaps damaged, and what is done with it; each must end with one of our errors, those of
`HARMLESS` with none at all.
"""

from dataclasses import dataclass, field

import numpy as np
from gguf.constants import GGMLQuantizationType as T


@dataclass(frozen=True)
class Case:
    """One way to break a pair."""

    error: str
    """Class of the error, a name in `dflash2.errors`."""
    says: str
    """Part of its message."""
    target: dict = field(default_factory=dict)
    """Changes of the target's file: keyword arguments of `edit_gguf`, or a name of `KINDS`."""
    drafter: dict = field(default_factory=dict)
    """Changes of the drafter's file; {"bytes": n} cuts it short."""
    options: dict = field(default_factory=dict)
    """Keyword arguments of `DFlashLlama`."""
    call: str = ""
    """What is done with the object `llm` when it could be made."""
    environment: dict = field(default_factory=dict)
    """Environment variables of a process of its own; values are folders that the test makes."""
    before: str = ""
    """What is done in a process of its own before our package is imported."""


def _f32(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


_NAN = float("nan")
_GENERATE = "[t for _, t in zip(range(40), llm.generate([5, 6, 7], temp=0.0))]"
_DECODE = "import numpy; llm._session.{0}.decode_tokens(numpy.zeros(300, numpy.int32), 0, 0)"
H, B = 128, 8  # hidden size and block of the tiny pair
# llama_cpp's structure as it was before a field came in: what an older one does with this library.
_OTHER_LAYOUT = """
import ctypes, llama_cpp.llama_cpp as module
kept = [field for field in module.llama_context_params._fields_ if field[0] != "n_rs_seq"]
module.llama_context_params = type("llama_context_params", (ctypes.Structure,), {"_fields_": kept})
module.llama_context_default_params.restype = module.llama_context_params
"""

CASES: dict[str, Case] = {
    # The pair.
    "target without layer inputs": Case(
        "TargetMismatchError", "does not publish layer inputs", target={"architecture": "phi3"}
    ),
    "drafter as target": Case("TargetMismatchError", "give the target first", target={"architecture": "dflash"}),
    "drafter without vocabulary": Case(
        "TargetMismatchError", "holds no vocabulary", drafter={"without": ["tokenizer.ggml.tokens"]}
    ),
    "tap beyond the last layer": Case(
        "TargetMismatchError", "taps the input of layer 9", drafter={"metadata": {"dflash.target_layers": [1, 3, 9]}}
    ),
    "negative tap": Case(
        "TargetMismatchError", "taps the input of layer -1", drafter={"metadata": {"dflash.target_layers": [1, 3, -1]}}
    ),
    "mask token outside the vocabulary": Case(
        "TargetMismatchError", "mask token", drafter={"metadata": {"tokenizer.ggml.mask_token_id": 100_000}}
    ),
    "hidden size of another target": Case(
        "TargetMismatchError", "hidden size", drafter={"metadata": {"dflash.embedding_length": 64}}
    ),
    # Numbers in a header that llama.cpp asserts or computes with.
    "no layers in the target": Case("GGUFError", "block_count", target={"metadata": {"qwen3.block_count": 0}}),
    "too many layers in the target": Case("GGUFError", "block_count", target={"metadata": {"qwen3.block_count": 600}}),
    "no layers in the drafter": Case("GGUFError", "block_count", drafter={"metadata": {"dflash.block_count": 0}}),
    "too many layers in the drafter": Case(
        "GGUFError", "block_count", drafter={"metadata": {"dflash.block_count": 513}}
    ),
    "no heads": Case("NativeError", "cannot load", drafter={"metadata": {"dflash.attention.head_count": 0}}),
    "no heads in the target": Case(
        "NativeError", "cannot load", target={"metadata": {"qwen3.attention.head_count": 0}}
    ),
    "no heads of keys": Case("NativeError", "cannot load", drafter={"metadata": {"dflash.attention.head_count_kv": 0}}),
    "an unknown kind of rope scaling": Case(
        "GGUFError", "rope.scaling.type", drafter={"metadata": {"dflash.rope.scaling.type": "spiral"}}
    ),
    "more experts in use than there are": Case(
        "GGUFError", "expert_used_count", target={"metadata": {"qwen3.expert_used_count": 3}}
    ),
    "more experts than llama.cpp knows": Case(
        "GGUFError", "expert_count", target={"metadata": {"qwen3.expert_count": 5000, "qwen3.expert_used_count": 2}}
    ),
    "experts and none in use": Case("GGUFError", "expert_used_count", target={"metadata": {"qwen3.expert_count": 4}}),
    "as many groups as experts": Case(
        "GGUFError",
        "expert_group_count",
        target={"metadata": {"qwen3.expert_count": 4, "qwen3.expert_used_count": 2, "qwen3.expert_group_count": 4}},
    ),
    "experts that do not divide into groups": Case(
        "GGUFError",
        "expert_group_count",
        target={"metadata": {"qwen3.expert_count": 4, "qwen3.expert_used_count": 2, "qwen3.expert_group_count": 3}},
    ),
    "groups without experts": Case(
        "GGUFError", "expert_group_count", drafter={"metadata": {"dflash.expert_group_count": 2}}
    ),
    "more prediction layers than layers": Case(
        "GGUFError", "nextn_predict_layers", target={"metadata": {"qwen3.nextn_predict_layers": 9}}
    ),
    "a hyper-connected drafter": Case(
        "TargetMismatchError", "hyper_connection_count", drafter={"metadata": {"dflash.hyper_connection_count": 4}}
    ),
    "block of one": Case("TargetMismatchError", "block_size", drafter={"metadata": {"dflash.block_size": 1}}),
    "no convolution sizes": Case("NativeError", "cannot load", drafter={"metadata": {"dflash.conv_kernel_size": 0}}),
    "odd convolution group": Case("NativeError", "cannot load", drafter={"metadata": {"dflash.conv_group_size": 7}}),
    "lattice wider than a row": Case("NativeError", "cannot load", drafter={"metadata": {"dflash.selector_top_k": 64}}),
    "head width that does not fit": Case(
        "NativeError",
        "cannot load",
        drafter={"metadata": {"dflash.attention.key_length": 30, "dflash.attention.value_length": 30}},
    ),
    "odd rope dimensions": Case(
        "GGUFError", "rope.dimension_count", drafter={"metadata": {"dflash.rope.dimension_count": 31}}, call=_GENERATE
    ),
    "rope wider than a head": Case(
        "GGUFError", "rope.dimension_count", drafter={"metadata": {"dflash.rope.dimension_count": 64}}, call=_GENERATE
    ),
    "rope wider than a head of the target": Case(
        "GGUFError", "rope.dimension_count", target={"metadata": {"qwen3.rope.dimension_count": 64}}, call=_GENERATE
    ),
    "a pattern for fewer layers": Case(
        "TargetMismatchError",
        "sliding_window_pattern",
        drafter={"metadata": {"dflash.attention.sliding_window_pattern": [True]}},
    ),
    "values wider than keys": Case(
        "TargetMismatchError",
        "value_length",
        drafter={
            "metadata": {"dflash.attention.value_length": 64},
            "tensors": {f"blk.{layer}.attn_v.weight": (_f32(128, H), T.F32) for layer in (0, 1)},
        },
        call=_GENERATE,
    ),
    "convolution without its base": Case(
        "NativeError", "cannot load", drafter={"tensors": {"blk.0.attn_conv_base": None}}, call=_GENERATE
    ),
    # Types of tensors.
    "convolution base in F16": Case(
        "GGUFError",
        "attn_conv_base",
        drafter={"tensors": {"blk.0.attn_conv_base": (_f32(2, 2, H), T.F16)}},
        call=_GENERATE,
    ),
    "norm in F16": Case(
        "GGUFError", "attn_norm", drafter={"tensors": {"blk.0.attn_norm.weight": (_f32(H), T.F16)}}, call=_GENERATE
    ),
    "head norm in F16": Case(
        "GGUFError", "attn_q_norm", drafter={"tensors": {"blk.0.attn_q_norm.weight": (_f32(32), T.F16)}}, call=_GENERATE
    ),
    "rope factors in F16": Case(
        "GGUFError", "rope_freqs", drafter={"tensors": {"rope_freqs.weight": (_f32(16), T.F16)}}, call=_GENERATE
    ),
    "rope factors of another length": Case(
        "NativeError", "cannot load", drafter={"tensors": {"rope_freqs.weight": (_f32(8), T.F32)}}, call=_GENERATE
    ),
    "target's norm in F16": Case(
        "GGUFError", "attn_norm", target={"tensors": {"blk.0.attn_norm.weight": (_f32(H), T.F16)}}, call=_GENERATE
    ),
    # A reduced vocabulary.
    "d2t as floats": Case(
        "GGUFError",
        "d2t",
        drafter={"tensors": {"d2t": (_f32(64), T.F32), "output.weight": (_f32(64, H), T.F32)}},
        call=_GENERATE,
    ),
    "d2t out of range": Case(
        "GGUFError",
        "d2t",
        drafter={"tensors": {"d2t": (np.arange(64) + 1000, T.I64), "output.weight": (_f32(64, H), T.F32)}},
        call=_GENERATE,
    ),
    "d2t without a head of its own": Case(
        "GGUFError", "d2t", drafter={"tensors": {"d2t": (np.arange(64), T.I64)}}, call=_GENERATE
    ),
    "d2t smaller than the candidates": Case(
        "GGUFError",
        "d2t",
        drafter={"tensors": {"d2t": (np.arange(4), T.I64), "output.weight": (_f32(4, H), T.F32)}},
        call=_GENERATE,
    ),
    "head of another size": Case(
        "NativeError", "cannot load", drafter={"tensors": {"output.weight": (_f32(64, H), T.F32)}}
    ),
    # Damage.
    "drafter cut short": Case("GGUFError", "truncated", drafter={"bytes": 100_000}),
    "drafter's header cut short": Case("GGUFError", "truncated", drafter={"bytes": 300}),
    "target cut short": Case("GGUFError", "truncated", target={"bytes": 100_000}),
    "tensor missing in the target": Case("NativeError", "load", target={"tensors": {"blk.1.ffn_up.weight": None}}),
    "tensor missing in the drafter": Case(
        "NativeError", "cannot load", drafter={"tensors": {"blk.1.ffn_up.weight": None}}
    ),
    # Options.
    "depth beyond the block": Case("Dflash2Error", "depth", options={"depth": B}),
    "depth beyond n_batch": Case("Dflash2Error", "n_batch", options={"depth": 5, "n_batch": 4}),
    "n_batch of zero": Case("Dflash2Error", "n_batch", options={"n_batch": 0}),
    "n_ubatch too small for the snapshots": Case(
        "Dflash2Error", "n_ubatch", target={"kind": "lfm2"}, options={"depth": 7, "n_ubatch": 8}, call=_GENERATE
    ),
    "an unknown KV type": Case("Dflash2Error", "type_k", options={"type_k": 99}),
    "an unknown KV type of the drafter": Case("Dflash2Error", "type_k_draft", options={"type_k_draft": 99}),
    "a KV type that is no KV type": Case("Dflash2Error", "type_v", options={"type_v": 12}),
    "quantised values without flash attention": Case(
        "Dflash2Error", "flash_attn", options={"type_v": 8, "flash_attn": False}
    ),
    "quantised values of the drafter without flash attention": Case(
        "Dflash2Error", "flash_attn", options={"type_v_draft": 8, "flash_attn": False}
    ),
    "the CPU as a device": Case("NativeError", "nothing is offloaded", options={"device_draft": ["CPU"]}),
    "a device that is not there": Case("NativeError", "CUDA7", options={"device_draft": ["CUDA7"]}),
    "split by tensor": Case("Dflash2Error", "split_mode", options={"split_mode": 3}),
    "split mode unknown": Case("Dflash2Error", "split_mode", options={"split_mode": 17}),
    "embeddings": Case("Dflash2Error", "embedding", options={"embedding": True}),
    "more threads than ggml takes": Case("Dflash2Error", "n_threads", options={"n_threads": 100_000}, call=_GENERATE),
    "layers overridden": Case(
        "NativeError", "cannot load", options={"kv_overrides": {"qwen3.block_count": 5}}, call=_GENERATE
    ),
    # Calls.
    "token outside the vocabulary": Case("NativeError", "token ids", call="llm.eval([5, 1_000_000])"),
    "negative token": Case("NativeError", "token ids", call="llm.eval([-3])"),
    "more tokens than the context": Case("ContextLimitError", "do not fit", call="llm.eval([5] * 5000)"),
    "generation beyond the context": Case("ContextLimitError", "full", call="list(llm.generate([5] * 250, temp=0.0))"),
    "depth set too high": Case("Dflash2Error", "depth", call="llm.depth = 50"),
    "use after close": Case("NativeError", "closed", call="llm.close(); llm.eval([5])"),
    "generation after close": Case(
        "NativeError",
        "closed",
        call="g = llm.generate([5]); next(g); llm.close(); assert not list(g); next(llm.generate([5]))",
    ),
    "state of another shape": Case(
        "NativeError",
        "does not fit",
        call="llm.eval([5] * 20); s = llm.save_state(); s.drafter_memory = s.drafter_memory[:40]; llm.load_state(s)",
    ),
    "a recurrent target after close": Case(
        "NativeError", "closed", target={"kind": "lfm2"}, call="llm.eval([5, 6]); llm.close(); llm.eval([7])"
    ),
    "generation of a recurrent target after close": Case(
        "NativeError",
        "closed",
        target={"kind": "lfm2"},
        call="llm.eval([5, 6]); llm.close(); list(llm.generate([5, 9], temp=0.0))",
    ),
    "state of a closed object": Case("NativeError", "closed", call="llm.eval([5]); llm.close(); llm.save_state()"),
    "reset and depth after close": Case("NativeError", "closed", call="llm.close(); llm.reset(); llm.depth = 3"),
    "negative position": Case("NativeError", "", call="llm.n_tokens = -5; llm.eval([5])"),
    "batch beyond n_batch": Case("NativeError", "300 rows does not fit", call=_DECODE.format("target")),
    "non-causal batch beyond n_ubatch": Case("NativeError", "300 rows does not fit", call=_DECODE.format("drafter")),
    "tap of a layer that is not there": Case("NativeError", "cannot be tapped", call="llm._session.target.tap([99])"),
    # The library.
    "library without a symbol": Case("NativeError", "does not export", environment={"DFLASH2_LIBRARY": "bare"}),
    "library of another version": Case("NativeError", "another version", before=_OTHER_LAYOUT),
    "no library": Case("NativeError", "without libllama", environment={"LLAMA_CPP_LIB_PATH": "empty"}),
}

# Odd, but no error: the target's output is what it would be without a drafter.
HARMLESS: dict[str, Case] = {
    "block longer than the context": Case("", "", drafter={"metadata": {"dflash.block_size": 4000}}, call=_GENERATE),
    "NaN in the drafter": Case(
        "", "", drafter={"tensors": {"fc.weight": (_f32(H, 3 * H, value=_NAN), T.F32)}}, call=_GENERATE
    ),
    "NaN in the drafter's rows": Case(
        "", "", drafter={"tensors": {"output_norm.weight": (_f32(H, value=_NAN), T.F32)}}, call=_GENERATE
    ),
    "NaN in the target": Case(
        "", "", target={"tensors": {"output_norm.weight": (_f32(H, value=_NAN), T.F32)}}, call=_GENERATE
    ),
}
