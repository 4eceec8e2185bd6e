"""The first run on a GPU: random models at real sizes, and the times of their steps."""
