"""The places of models: a directory, a GGUF file, the demo, or the cache of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compilespec.demo import demo_directory
from compilespec.errors import ModelNotFound
from compilespec.errors.suggest import not_there
from compilespec.tracing.checkpoint_files import listed
from compilespec.tracing.hub import find_file_on_hub, find_on_hub, is_hub_file, is_hub_name

EXPECTED = (
    "a directory in Hugging Face layout, a GGUF file, a name of the hub such as org/name, or 'demo'"
)


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """A model on disk: a directory with config.json, or a GGUF file, which holds everything."""

    name: str  # the given name, without leading folders
    directory: Path
    gguf_file: str | None = None  # inside the directory

    @property
    def path(self) -> Path:
        """The path of the model: the directory, or the GGUF file."""
        return self.directory / self.gguf_file if self.gguf_file else self.directory


def find_model(model: str | Path) -> ModelPlace:
    """Find a model: "demo" is the packaged one; else a path that exists, a folder or a file; else a
    name of the hub ("org/name", "org/name@revision"), which is downloaded if it is not cached.

    Raises: ModelNotFound.
    """
    if model == "demo":
        return ModelPlace(name="demo", directory=Path(demo_directory()))
    path = Path(model)
    if path.is_file():
        return _file(path)
    if not path.exists() and is_hub_name(model):
        return ModelPlace(name=str(model), directory=_checkpoint(find_on_hub(str(model)), model))
    if not path.exists() and is_hub_file(model):
        return _file(find_file_on_hub(str(model)))
    if not path.exists():
        raise ModelNotFound(f"{not_there(path)}; expected {EXPECTED}")
    if (path / "config.json").is_file():
        is_demo = path == Path(demo_directory())
        return ModelPlace(name="demo" if is_demo else path.resolve().name, directory=path)
    return _only_gguf(path)


def _file(path: Path) -> ModelPlace:
    if path.suffix != ".gguf":
        raise ModelNotFound(
            f"{path} is a file, and no GGUF file; expected {EXPECTED}; give the directory that "
            "holds config.json"
        )
    return ModelPlace(name=path.stem, directory=path.parent, gguf_file=path.name)


def _only_gguf(directory: Path) -> ModelPlace:
    """The GGUF file of a directory without config.json, if it is the only one."""
    found = sorted(path.name for path in directory.glob("*.gguf"))
    if len(found) > 1:
        raise ModelNotFound(
            f"{directory} holds several GGUF files ({listed(found)}); give the path of one"
        )
    if not found:
        raise ModelNotFound(
            f"{directory} holds no config.json and no GGUF file; expected {EXPECTED}"
        )
    return _file(directory / found[0])


def _checkpoint(folder: Path, name: str | Path) -> Path:
    """A folder of the hub's cache, if it holds a checkpoint."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{name} holds no config.json on the hub; if it has GGUF files, name one by the end of "
            f"its name, such as {str(name).partition('@')[0]}:Q4_K_M"
        )
    return folder
