"""Ollama Modelfiles for a target and its drafter."""
