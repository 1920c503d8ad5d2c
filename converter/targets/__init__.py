"""What a drafter needs of its target: a GGUF file, or a Hugging Face folder."""
