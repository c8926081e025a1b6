"""Resolves `model.path` without torch: the tiny model, a folder of this machine, or a model of the hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config.messages import did_you_mean
from async_flowrl.policies.architectures import KNOWN

TINY = "tiny"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_index(path: str) -> Path | None:
    """model_index.json of a local folder; None for the tiny model and for what may be on the hub.

    Raises ValueError, one sentence, for a folder that holds no pipeline and for what can be neither.
    """
    if path == TINY:
        return None
    local = Path(path).expanduser()
    if local.exists():
        index = local / "model_index.json"
        if not index.is_file():
            raise ValueError(f"model.path {path} is not a diffusers folder: it has no model_index.json")
        return index
    if not _HUB_NAME.fullmatch(path):
        near = [str(entry) for entry in local.parent.iterdir()] if local.parent.is_dir() else []
        raise ValueError(not_found(path, "no such folder", near))
    return None


def not_found(path: str, reason: str, neighbours: Sequence[str] = ()) -> str:
    """The sentence for a model that is not there, with the nearest that is known."""
    known = [TINY, *KNOWN, *neighbours]
    return f"model.path {path!r} was not found: {reason}{'' if path in known else did_you_mean(path, known)}"
