"""Stamp files: each says that a model family of your own was compared with its diffusers pipeline and found equal.

`async-flowrl check-model` compares and writes them; a run warns if one is missing. A stamp is valid for one source
code of the family, one version of diffusers and one pipeline class.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

from async_flowrl.config.hub import hub_file
from async_flowrl.config.paths import cache_dir
from async_flowrl.config.resolution import Resolution, written
from async_flowrl.policies.registry import FAMILIES, load_family


def unchecked(name: str, path: str, revision: str | None, *, resolution: Resolution) -> str | None:
    """Returns a warning, with the command to run, if family `name` is not shipped and has no stamp; else None."""
    if name in FAMILIES or name in FAMILIES.values():
        return None
    pipeline = pipeline_class(path, revision)
    if stamp_of(name, pipeline).is_file():
        return None
    warning = f"model.family={name} was never compared with its stock pipeline, and a wrong one trains all the same"
    if not in_diffusers(pipeline):
        return f"{warning}; diffusers has no {pipeline} to compare it with"
    return f"{warning}: async-flowrl check-model {path} --family {name} --resolution {written(resolution)}"


def in_diffusers(pipeline: str) -> bool:
    import diffusers

    return hasattr(diffusers, pipeline)


def stamp_of(name: str, pipeline: str) -> Path:
    kind = name.rpartition(":")[2]  # by a file or by a module
    text = json.dumps([kind, source_digest(name), version("diffusers"), pipeline])
    return cache_dir() / "checked" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write_stamp(name: str, pipeline: str, result: str) -> Path:
    """Writes the stamp and returns its path; `result` is the result of the comparison in words, for people."""
    stamp = stamp_of(name, pipeline)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    content = {"family": name, "pipeline": pipeline, "diffusers": version("diffusers"), "compared": result}
    stamp.write_text(json.dumps(content, indent=2) + "\n")
    return stamp


def source_digest(name: str) -> str:
    """Returns the hexadecimal SHA-256 of the source files of a family, its policy class and all their base classes."""
    family = type(load_family(name))
    kinds = [*family.__mro__, *getattr(getattr(family, "policy", None), "__mro__", ())]
    modules = {kind.__module__ for kind in kinds} - {"abc", "typing"}
    files = {file for module in modules if (file := getattr(sys.modules[module], "__file__", None))}
    contents = sorted(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(contents).encode()).hexdigest()


def pipeline_class(path: str, revision: str | None) -> str:
    folder = Path(path)
    index = folder / "model_index.json" if folder.is_dir() else hub_file(path, "model_index.json", revision)
    return str(json.loads(index.read_text(encoding="utf-8")).get("_class_name"))
