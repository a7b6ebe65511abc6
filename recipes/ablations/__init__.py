"""Experiments that replace an op of the engine, to measure what it contributes."""
