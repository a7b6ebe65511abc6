"""Requests in, tokens out: batching, scheduling, sampling. Knows ids; text only as stop strings."""
