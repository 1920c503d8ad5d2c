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
