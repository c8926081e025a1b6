"""Arguments of `python -m async_flowrl.check_model`; importing this module does not import torch."""

import argparse

from async_flowrl.config.sections.model import TinyConfig

DTYPES = ("bfloat16", "float32")


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="python -m async_flowrl.check_model",
        description="Compares a model family with diffusers' own pipeline and names the first step that differs.",
    )
    option = command_line.add_argument
    option("model", metavar="NAME_OR_PATH", help="model.path: tiny, a diffusers folder or a hub name")
    option("--family", default="auto", help="model.family: a name, or pkg.module:attr (default: auto)")
    option("--tiny-family", default=TinyConfig().family, help="model.tiny.family, where the model is tiny")
    option("--prompt", default="a red apple on a wooden table")
    option("--steps", type=int, default=6, help="denoising steps (default 6)")
    option("--guidance", type=float, help="of the kind that the family takes (default: its usual one)")
    option("--resolution", metavar="SIZE", help="512, or HEIGHTxWIDTH in pixels (default 512; of tiny 32)")
    option("--dtype", choices=DTYPES, default="float32", help="default float32: no rounding")
    option("--max-sequence-length", type=int, help="model.max_sequence_length")
    return command_line
