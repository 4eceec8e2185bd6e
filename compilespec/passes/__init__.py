"""Graph passes, one per file; `order.py` lists them in the order in which they run."""
