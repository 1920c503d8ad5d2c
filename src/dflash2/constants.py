"""The supported pair of llama-cpp-python and llama.cpp, and the numbers of the GGUF format: their one home."""

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
LLAMA_CPP_COMMIT = "0c1e57098"
GGML_VERSION = "0.25.3"
SDIST_NAME = f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}.tar.gz"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
# Folder of llama.cpp inside the sdist.
SDIST_SOURCE_FOLDER = f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}/vendor/llama.cpp"

# GGUF architecture of every DFlash drafter, v1 and 2.
DRAFTER_ARCHITECTURE = "dflash"

# Architectures whose graph publishes layer inputs (sets `t_layer_inp` in src/models/*.cpp of the pinned source, or
# reuses such a graph). Any other one aborts the process when a layer is tapped; a test derives this list again.
# fmt: off
TAPPABLE_ARCHITECTURES = frozenset({
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama",
    "llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
})
# fmt: on
# Of those, the ones that also publish what goes into the final norm (a tap at the output of the last layer).
FINAL_TAP_ARCHITECTURES = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
# Of those, the ones whose recurrent state llama.cpp can step back by snapshots (`n_rs_seq`; the list in
# `llm_arch_supports_rs_rollback`, src/llama-arch.cpp of the pinned source; a test derives it again).
SNAPSHOT_ARCHITECTURES = frozenset({
    "bailingmoe3", "deepseek4", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp",
})  # fmt: skip
