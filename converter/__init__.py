"""Hugging Face drafter checkpoint to GGUF."""
