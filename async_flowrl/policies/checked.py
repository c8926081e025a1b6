"""Stamps of families that were compared with their stock pipeline: one per source, diffusers version and pipeline.

A family that changes, or meets another diffusers or another pipeline, has to be compared again.
"""

import hashlib
import inspect
import json
from importlib.metadata import version
from pathlib import Path

from async_flowrl.config.resolution import written
from async_flowrl.policies.download import hub_file
from async_flowrl.policies.registry import FAMILIES, load_family
from async_flowrl.policies.tiny.build import cache_dir
from async_flowrl.types import Resolution


def unchecked(name: str, path: str, revision: str | None, *, resolution: Resolution) -> str | None:
    """A sentence for a family of one's own that was never compared with the pipeline of the model at `path`.

    It names the command that compares them, at `resolution` pixels.
    """
    if is_shipped(name):
        return None
    pipeline = pipeline_class(path, revision)
    if stamp_of(name, pipeline).is_file():
        return None
    wrong = f"model.family={name} was never compared with its stock pipeline, and a wrong one trains without complaint"
    if not in_diffusers(pipeline):
        return f"{wrong}; diffusers has no {pipeline} to compare it with"
    return f"{wrong}: async-flowrl check-model {path} --family {name} --resolution {written(resolution)}"


def in_diffusers(pipeline: str) -> bool:
    """Whether there is a stock pipeline of that class."""
    import diffusers

    return hasattr(diffusers, pipeline)


def is_shipped(name: str) -> bool:
    """Whether it is one of the package's own families, by its name or by its path."""
    return name in FAMILIES or name in FAMILIES.values()


def stamp_of(name: str, pipeline: str) -> Path:
    """The file that is there once the family `name` was found equal to the diffusers pipeline of class `pipeline`."""
    text = json.dumps([name, source_digest(name), version("diffusers"), pipeline])
    return cache_dir() / "checked" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write_stamp(name: str, pipeline: str, said: str) -> Path:
    """Writes the stamp, with a sentence for whoever opens it."""
    stamp = stamp_of(name, pipeline)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    described = {"family": name, "pipeline": pipeline, "diffusers": version("diffusers"), "compared": said}
    stamp.write_text(json.dumps(described, indent=2) + "\n")
    return stamp


def source_digest(name: str) -> str:
    """SHA-256 of the files that the family and its policy are written in, those of their base classes included."""
    family = type(load_family(name))
    kinds = [*family.__mro__, *getattr(getattr(family, "policy", None), "__mro__", ())]
    files = {file for kind in kinds if (file := _source(kind)) is not None}
    contents = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(contents).encode()).hexdigest()


def pipeline_class(path: str, revision: str | None) -> str:
    """`_class_name` in the model_index.json of a local folder or of a hub model."""
    folder = Path(path)
    index = folder / "model_index.json" if folder.is_dir() else hub_file(path, "model_index.json", revision)
    return str(json.loads(index.read_text()).get("_class_name"))


def _source(kind: type) -> Path | None:
    """None for classes of the interpreter itself, and for what was never in a file."""
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    known = file is not None and kind.__module__ not in ("abc", "builtins", "typing") and Path(file).is_file()
    return Path(file) if known and file is not None else None
