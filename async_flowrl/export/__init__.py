"""python -m async_flowrl.export SOURCE OUT: a folder to publish, with a LoRA for diffusers and PEFT and a model card.

A folder saved by PEFT's own `save_pretrained` does not do for diffusers: its names start with `base_model.model.`,
diffusers matches none of them, warns, and generates with the untouched base model.
"""

from async_flowrl.export.command import main
from async_flowrl.export.source import export, save_lora

__all__ = ["export", "main", "save_lora"]
