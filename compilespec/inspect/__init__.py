"""Looks inside a program: the work of its passes, their correctness, its cost."""
