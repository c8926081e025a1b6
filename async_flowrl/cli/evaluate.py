"""async-flowrl evaluate RUN_OR_LORA: the rewards of the base model and of the trained weights, in diffusers' pipeline.

With the run's evaluation seed, the initial noises are those of the run's own evaluations.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from async_flowrl.cli.before_after import evaluate, table, write
from async_flowrl.cli.evaluation_job import job_of
from async_flowrl.cli.options import count, folder, of_option, seed
from async_flowrl.config import exit_codes
from async_flowrl.controller.reward_servers import ServerLost
from async_flowrl.observability.terminal import refuse

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 3 if a score is missing, 2 for wrong arguments, 1 if the server of a reward failed."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("separation").setLevel(logging.WARNING)  # hides the normal end of a reward's server
    try:
        comparison = evaluate(job_of(options), device="cuda" if torch.cuda.is_available() else "cpu")
        sys.stdout.write(table(comparison))
        for written in write(comparison, options.out) if options.out is not None else ():
            logger.info("wrote %s", written)
    except (ValueError, OSError) as error:
        return refuse(of_option(error, "--base", options.base))
    except ServerLost as error:
        return refuse(error, exit_codes.ERROR)
    return exit_codes.INCOMPLETE if comparison.missing else exit_codes.OK


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(prog="async-flowrl evaluate", description="Scores before and after.")
    option = command_line.add_argument
    option("source", type=Path, metavar="RUN_OR_LORA", help="a run directory, a LoRA of any format, or RUN/transformer")
    option("--lora", type=Path, help="with a run directory: other weights than its own, a LoRA or OUT/transformer")
    option("--base", help="tiny, a diffusers folder or a hub name (default: the run's, or the LoRA's own)")
    option("--prompts", type=Path, help="a file of prompts (default: those of the run's evaluations)")
    option("--max-prompts", type=count, help="from the beginning of the file (default: all of FILE, or as the run)")
    option("--reward", action="append", help="a name, pkg.module:attr, or a term of the run (default: the run's)")
    option("--images", type=count, help="images per prompt and seed (default: the run's, or 8)")
    option("--seeds", type=count, help="how many seeds, counted up from --seed (default 1)")
    option("--seed", type=seed, help="first seed of the noises (default: the run's evaluations')")
    option("--num-inference-steps", type=count, help="denoising steps")
    option("--guidance", type=float, help="guidance scale, of the kind that the model family takes")
    option("--resolution", metavar="SIZE", help="512, [FRAMESx]HEIGHTxWIDTH in pixels (default: by prompt or run)")
    option("--out", type=folder, help="a folder for evaluation.json and before_after.png")
    return command_line
