"""Proves that a step reads and writes inside its tensors, for all sizes: ranges of integers."""
