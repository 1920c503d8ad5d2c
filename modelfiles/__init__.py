"""Ollama Modelfiles for a target and its drafter; nothing of it exists in this version."""
