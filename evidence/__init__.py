"""Proof of unchanged output and measured speed."""
