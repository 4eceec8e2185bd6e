"""Models of the hub by name: found in its cache, or downloaded into it.

huggingface_hub decides where the cache is (HF_HOME), which token is used, and whether the network
may be asked (HF_HUB_OFFLINE).
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from compilespec.errors import ModelNotFound
from compilespec.tracing.checkpoint_files import reason

# The form "org/name", with a branch, tag or commit after an "@".
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")

# The form "org/name:Q4_K_M", or with a file's name: one of a repository's GGUF files.
HUB_FILE = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*):(?P<file>\w[\w.-]*)")

# The files that are read of a checkpoint; weights as safetensors, or else as pickles.
FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
PICKLES = ["pytorch_model*.bin", "pytorch_model*.bin.index.json", "medusa_lm_head.pt"]
OTHERS = ["*/*", "consolidated*"]  # folders, and other forms of the same weights


def is_hub_name(name: object) -> bool:
    """True where a name has the form "org/name" or "org/name@revision"."""
    return isinstance(name, str) and HUB_NAME.fullmatch(name) is not None


def find_on_hub(name: str) -> Path:
    """The folder of the hub's cache that holds a model, downloaded where it is not there yet.

    Args:
        name: for which `is_hub_name` holds.
    Raises: ModelNotFound (no such model or revision, no access, or neither cached nor reachable).
    """
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    repo, revision = match["name"], match["revision"]
    command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    folder = _download(name, repo, FILES, command, revision)
    if not any(folder.glob("*.safetensors")):
        folder = _download(name, repo, PICKLES, command, revision)
    return folder


def is_hub_file(name: object) -> bool:
    """True where a name has the form "org/name:Q4_K_M"."""
    return isinstance(name, str) and HUB_FILE.fullmatch(name) is not None


def find_file_on_hub(name: str) -> Path:
    """The GGUF file of the hub's cache that a name such as "org/name:Q4_K_M" leads to.

    Args:
        name: for which `is_hub_file` holds.  The case of the part behind the colon does not count.
    Raises: ModelNotFound (as above, or no such file, or several).
    """
    match = HUB_FILE.fullmatch(name)
    assert match is not None
    repo, wanted = match["name"], match["file"].removesuffix(".gguf")
    ending = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in wanted)
    patterns = [f"*[-._/]{ending}.gguf", f"{ending}.gguf"]
    folder = _download(name, repo, patterns, f"hf download {repo} --include '*{wanted}.gguf'")
    found = sorted(
        one for one in folder.rglob("*.gguf") if any(fnmatchcase(one.name, p) for p in patterns)
    )
    if len(found) != 1:
        others = found or sorted(folder.rglob("*.gguf"))
        names = ", ".join(one.name for one in others) or "none"
        raise ModelNotFound(
            f"{name}: expected one GGUF file of {repo} whose name ends with {wanted}; "
            f"{'found' if found else 'downloaded so far are'}: {names}; give a name that the page "
            "of the repository lists"
        )
    return found[0]


def _download(
    name: str, repo: str, patterns: list[str], command: str, revision: str | None = None
) -> Path:
    """The folder of a repository's snapshot, with the files of these patterns.

    Raises: ModelNotFound; it has `command`, which downloads them by hand.
    """
    from huggingface_hub import errors, snapshot_download

    others = None if patterns[0].endswith(".gguf") else OTHERS
    try:
        with _bars_on_terminals_only():
            return Path(
                snapshot_download(
                    repo, revision=revision, allow_patterns=patterns, ignore_patterns=others
                )
            )
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name} is gated: accept its terms on its page of the hub and log in: hf auth login"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelNotFound(
            f"{name} is no directory here, and the hub has no such model or revision, or not for "
            "you: check its name, or log in: hf auth login"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: no such directory, not (completely) downloaded, and the hub cannot be "
            f"reached; where there is network, download it: {command}"
        ) from error
    except Exception as error:  # errors that the network and the disk may raise
        raise ModelNotFound(
            f"{name} cannot be downloaded from the hub: {reason(error)}; try {command}"
        ) from error


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub import utils

    silent = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    if silent:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if silent:
            utils.enable_progress_bars()
