"""Builds tiny diffusers pipelines with random weights, offline: `model.path=tiny`, for tests and first trials.

A tiny model has the architecture and the files of the real family, about 4 MB, and takes about a second to build.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from async_flowrl.config.check import check_fields
from async_flowrl.config.messages import unknown_name
from async_flowrl.config.own_code import import_named
from async_flowrl.config.schema import TinyConfig
from async_flowrl.seeds import untouched_rng

TINY = ("qwen_image", "sd3", "flux", "z_image", "sana")
"""Values of `model.tiny.family`, each a module beside this one; a function of your own is named `pkg.module:attr` or
`file.py:attr`."""
_RECIPE = 1
"""Part of the cache key; increase it when the built bytes change."""


def cache_dir() -> Path:
    """Returns this package's cache folder: `$ASYNC_FLOWRL_CACHE`, or ~/.cache/async_flowrl."""
    return Path(os.environ.get("ASYNC_FLOWRL_CACHE", "~/.cache/async_flowrl")).expanduser()


def build_tiny(config: TinyConfig, cache: Path | None = None) -> Path:
    """Returns the folder of the tiny pipeline for `config`; builds it on first use, always with the same bytes.

    The global random state does not change. Raises ValueError for an unknown family and for sizes that make no model.
    """
    if config.family not in TINY and ":" not in config.family:
        raise ValueError(unknown_name("model.tiny.family", config.family, TINY))
    check_fields(config, "model.tiny.")
    shipped = f"{__package__}.{config.family}:tiny_pipeline"

    def build(folder: Path) -> None:
        from async_flowrl.policies.loading import quiet

        tiny_pipeline = import_named("model.tiny.family", shipped if config.family in TINY else config.family)
        with untouched_rng(config.seed), quiet():
            tiny_pipeline(config).save_pretrained(folder, safe_serialization=True)

    return cached((cache or cache_dir()) / f"tiny-{_key(config)}", build)


def cached(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns the folder of a diffusers model, which `build` fills if it is not there.

    Several processes may call it at once: each builds in a temporary folder, and the first rename is kept.
    """
    if (target / "model_index.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / "model_index.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _key(config: TinyConfig) -> str:
    """Returns the cache key. It contains library versions, because they can change the random initialisation."""
    text = json.dumps([_RECIPE, asdict(config), _versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _versions() -> list[str]:
    """Returns the libraries' versions. Python parses a package's whole description for its version."""
    return [version(package) for package in ("diffusers", "transformers", "torch")]
