"""Readers of every dialect of config.json, and what they share."""
