"""Rewrites the step on ATen, after the one retrace: all that matches and replaces."""
