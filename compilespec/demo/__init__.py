"""The demo pair that ships with the package: a small target and its EAGLE-3 head."""

from pathlib import Path


def demo_directory() -> Path:
    """Return the folder of the demo target; its drafters are in subfolders named by method."""
    return Path(__file__).parent / "checkpoint"
