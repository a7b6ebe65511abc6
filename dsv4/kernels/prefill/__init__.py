"""Prompts: many tokens of few sequences, launched eagerly."""
