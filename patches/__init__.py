"""Builds of llama.cpp from its pinned source."""
