"""Speeds of compilespec compared with transformers and llama.cpp: `python -m tools.bench`.

Outputs are checked before any speed is printed.  Numbers are comparable only within one run: all
ways take turns on the same prompts in one process, and the gates are ratios.
"""
