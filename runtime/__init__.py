"""The DFlash 2 loop inside llama-cpp-python."""
