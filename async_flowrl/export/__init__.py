"""Export of trained weights: a folder to publish, with a model card.

python -m async_flowrl.export SOURCE OUT

Of a LoRA it holds files for diffusers and PEFT; of a run with tune=full, the whole pipeline, or its transformer.

python -m async_flowrl.export SOURCE OUT

`export` and `save_lora` are the Python entry points. A folder that PEFT's `save_pretrained` wrote does not work in
diffusers: its names start with `base_model.model.`, diffusers matches none of them, warns, and generates with the base
model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_flowrl.export.command import main
    from async_flowrl.export.source import export, save_lora

__all__ = ["export", "main", "save_lora"]
_WHERE = {"export": "source", "main": "command", "save_lora": "source"}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that the command can check its arguments before torch is imported."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
