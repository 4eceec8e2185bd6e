"""Other libraries say nothing, while compilespec loads them, that nobody here can act on."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# torchao's import tells of its libraries for other devices and Pythons, and torch of what torchao
# must change for later versions.
_TALKERS = ("torchao", "torch.utils._pytree")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Around an import of torchao, or of transformers' models, which import it where it is
    installed.
    """
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
    """Around transformers' loading: what starting does is told by `compilespec.progress`."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    if was_enabled:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
