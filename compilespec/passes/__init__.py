"""Graph passes, one a file; `order.py` lists them as they run."""
