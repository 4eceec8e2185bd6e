"""Silences messages of other libraries during loading, on which users cannot act."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# On import, torchao logs missing libraries for other devices and Pythons, and torch warns of
# deprecated calls in torchao.
_TALKERS = ("torchao", "torch.utils._pytree")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """A context for importing torchao, or transformers' models, which import it if installed."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context for transformers' loading: `compilespec.progress` reports the progress instead."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    if was_enabled:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
