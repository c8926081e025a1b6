"""Arguments of `python -m async_flowrl.export`; importing this module does not import torch."""

import argparse
from pathlib import Path

FORMS = ("comfyui", "kohya")
"""Choices of `--format`: the names of file layouts in `policies/lora_formats.py`."""
WHAT = ("pipeline", "transformer")
"""Choices of `--merged`: the part of the model that is written with the LoRA in its weights."""


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="python -m async_flowrl.export", description="Writes what was trained in a folder that can be published."
    )
    option = command_line.add_argument
    option("source", type=Path, metavar="SOURCE", help="a run directory, a checkpoint, or any LoRA")
    option(
        "out",
        type=Path,
        metavar="OUT",
        help="the folder: diffusers' file and peft/, or the trained pipeline; README.md",
    )
    option("--raw", action="store_true", help="the trained weights even if the run kept their EMA")
    option("--base", help="tiny, a diffusers folder or a hub name (default: the run's, or the LoRA's own)")
    option(
        "--format",
        dest="form",
        action="append",
        choices=FORMS,
        help="also a single file in these names; may be given twice",
    )
    option(
        "--merged",
        nargs="?",
        const=WHAT[0],
        choices=WHAT,
        help="also the model with the LoRA in its weights; with tune=full: which of them to write",
    )
    option("--license", help="as the Hub writes it, e.g. apache-2.0")
    option("--evaluation", type=Path, help="a folder of python -m async_flowrl.evaluate, for the card")
    return command_line
