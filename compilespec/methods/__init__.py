"""The drafting methods, a folder each; `registry.py` lists them."""
