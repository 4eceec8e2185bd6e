"""Detects use of an object in another process than the one that made it."""

from __future__ import annotations

import os

from compilespec.errors import NotSupported


class Process:
    """The process that made the object."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_another(self) -> bool:
        """True where this is another process: a child that was forked since."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Refuse to work in a child, which has none of the threads that steps run on.  Raises:
        NotSupported.

        Raises: NotSupported.
        """
        if self.is_another:
            raise NotSupported(
                f"the engine was made in process {self._id} and this is a fork of it, "
                f"{os.getpid()}, without its threads: compile in the child, or start processes "
                "with multiprocessing.get_context('spawn')"
            )
