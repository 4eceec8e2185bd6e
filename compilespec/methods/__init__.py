"""The drafting methods, one folder each; `registry.py` lists them."""
