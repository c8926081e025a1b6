"""A run with tune=full as a diffusers folder: the base pipeline with the trained transformer in its place."""

import shutil
from pathlib import Path

from async_flowrl.export.merged import IGNORED, TRANSFORMER
from async_flowrl.export.source import Source
from async_flowrl.policies import trained_file
from async_flowrl.policies.registry import resolve_model


def write_whole(source: Source, out: Path, what: str) -> Path:
    """Writes `out`/transformer and, for what="pipeline", everything else of the base pipeline beside it; returns the
    transformer's folder.

    Raises ValueError, one sentence, where the base model is not known or the weights are not its own, where the disk is
    too small, and where `out` holds a model already.
    """
    if source.model is None or source.whole is None:
        raise ValueError("--base is needed: SOURCE does not say which model it is for")
    target = out / TRANSFORMER
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or export elsewhere")
    model = resolve_model(source.model)
    base = trained_file.base_folder(model, "all" if what == "pipeline" else "transformer")
    copied = [each for each in base.parent.iterdir() if each != base] if what == "pipeline" else []
    needed = sum(file.stat().st_size for each in (base, *copied) for file in (each, *each.rglob("*")) if file.is_file())
    out.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(out).free):
        raise ValueError(f"{target} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free there")
    ignore = shutil.ignore_patterns(*IGNORED)
    for each in copied:
        if each.is_dir() and each.name not in ignore(str(base.parent), [each.name]):
            shutil.copytree(each, out / each.name, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)
        elif each.is_file() and each.suffix == ".json":
            shutil.copyfile(each, out / each.name)
    return trained_file.save_whole(target, source.whole, model)
