"""Rows, prompts, tokens and sequences."""
