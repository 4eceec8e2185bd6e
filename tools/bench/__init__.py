"""Speeds of compilespec beside transformers and llama.cpp: `python -m tools.bench`.

Outputs are checked before any speed is printed.  Numbers mean something only beside numbers of the
same run: all ways take turns on the same prompts in one process, and the gates are ratios.
"""
