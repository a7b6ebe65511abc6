"""Decode step: one token of each sequence, inside the graph. Some also serve prompts, and say so."""
