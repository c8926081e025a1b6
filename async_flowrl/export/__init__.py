"""python -m async_flowrl.export SOURCE OUT: a folder to publish, with a model card.

Of a LoRA it holds files for diffusers and PEFT; of a run with tune=full, the whole pipeline, or its transformer.

A folder saved by PEFT's own `save_pretrained` does not do for diffusers: its names start with `base_model.model.`,
diffusers matches none of them, warns, and generates with the untouched base model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_flowrl.export.command import main
    from async_flowrl.export.source import export, save_lora

__all__ = ["export", "main", "save_lora"]
_WHERE = {"export": "source", "main": "command", "save_lora": "source"}


def __getattr__(name: str) -> Any:
    """Loads what is asked for, so that the command can say what is wrong with its arguments before it loads torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
