"""async-flowrl export SOURCE OUT: a folder to publish, with a model card.

Of a LoRA it holds files for diffusers and PEFT; of a run with tune=full, the whole pipeline, or its transformer. A
folder of PEFT's `save_pretrained` does not work in diffusers: its names start with `base_model.model.`, diffusers
matches none of them, warns, and generates with the base model.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.cli.options import of_option
from async_flowrl.config import exit_codes
from async_flowrl.observability.terminal import refuse

logger = logging.getLogger(__name__)

WHOLES = ("pipeline", "transformer")  # Choices of `--merged`; with tune=full: which of them to write.
FORMS = ("comfyui", "kohya")  # Choices of `--format`: the names of file layouts in `policies/lora_formats.py`.


def main(arguments: Sequence[str] | None = None) -> int:
    command_line = argparse.ArgumentParser(prog="async-flowrl export", description="Writes a folder to publish.")
    option = command_line.add_argument
    option("source", type=Path, metavar="SOURCE", help="a run directory, a checkpoint, or any LoRA")
    option("out", type=Path, metavar="OUT", help="the folder: a LoRA in diffusers' file and peft/, or the pipeline")
    option("--raw", action="store_true", help="the trained weights even if the run kept their EMA")
    option("--base", help="tiny, a diffusers folder or a hub name (default: the run's, or the LoRA's own)")
    option("--format", dest="form", action="append", choices=FORMS, help="also a single file in these names")
    option("--merged", nargs="?", const=WHOLES[0], choices=WHOLES, help="also the model, the LoRA in its weights")
    option("--license", help="as the Hub writes it, e.g. apache-2.0")
    option("--evaluation", type=Path, help="a folder of async-flowrl evaluate, for the card")
    options = command_line.parse_args(arguments)
    from async_flowrl.cli.exported import publish  # imports torch, which help and wrong arguments do not wait for

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        written, refused = publish(options)
    except (ValueError, OSError) as error:
        written, refused = [], [str(error)]
    for path in written:
        logger.info("wrote %s", path)
    return max((refuse(of_option(sentence, "--base", options.base)) for sentence in refused), default=exit_codes.OK)
