"""The command `async-flowrl check-model NAME_OR_PATH`: arguments, and the table of compared steps."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from async_flowrl.config import exit_codes
from async_flowrl.config.schema import ModelConfig, TinyConfig

if TYPE_CHECKING:
    from rich.table import Table

    from async_flowrl.check_model.compare import Job
    from async_flowrl.check_model.rows import Row
    from async_flowrl.generate import Settings

logger = logging.getLogger(__name__)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints the table and names the first step that differs; returns the exit code.

    It is 0 if every step agrees with diffusers' own ("stock") pipeline, 1 if one differs, and 2 if there is nothing to
    compare. After agreement it records that the family was checked, so that runs no longer warn.
    """
    given = parser().parse_args(arguments)  # before torch is imported, so that help and errors appear at once
    import torch

    from async_flowrl.check_model.compare import compare, job_of
    from async_flowrl.observability.terminal import print_table
    from async_flowrl.policies.checked import write_stamp

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        job = job_of(settings_of(given), given.prompt, "cuda" if torch.cuda.is_available() else "cpu")
    except (ValueError, OSError, ImportError) as error:
        logger.error("%s", error)
        return exit_codes.CONFIG
    sys.stdout.write(f"{job.model.family} against diffusers' {job.pipeline_name}: {_how(job)}\n")
    rows = compare(job)
    print_table(table(rows))
    differing = [row for row in rows if not row.holds]
    if differing:
        sys.stdout.write(f"{differing[0].step} is the first step that differs: {differing[0].said}\n")
        return exit_codes.ERROR
    try:
        write_stamp(job.model.family, job.pipeline_name, _how(job))
    except OSError as error:
        logger.warning("runs will go on to warn, that it was compared cannot be kept: %s", error)
    sys.stdout.write(f"{job.model.family} is {job.pipeline_name}: all {len(rows)} steps agree\n")
    return exit_codes.OK


def settings_of(given: argparse.Namespace) -> "Settings":
    """Returns the arguments as settings; what is not given is the usual value of the model's family."""
    from async_flowrl.config.resolution import asked_resolution
    from async_flowrl.generate import Settings
    from async_flowrl.policies.registry import load_family, resolve_model
    from async_flowrl.types import Sampling

    model = ModelConfig(
        path=given.model,
        family=given.family,
        dtype=given.dtype,
        tiny=TinyConfig(family=given.tiny_family),
        max_sequence_length=given.max_sequence_length,
    )
    cfg, embedded = load_family(resolve_model(model).family).usual_guidance
    if given.guidance is not None:
        cfg, embedded = (cfg, given.guidance) if embedded > 0 else (given.guidance, embedded)
    resolution = asked_resolution(given.resolution or ("32" if given.model == "tiny" else "512"))
    sampling = Sampling(resolution, given.steps, cfg, embedded, "a grey, dull and blurry picture", "ode", 0.0)
    return Settings(model, sampling)


def table(rows: "Sequence[Row]") -> "Table":
    """One row per step: the largest difference, absolute and relative to the stock pipeline's largest value."""
    from rich.table import Table

    drawn = Table()
    drawn.add_column("step", no_wrap=True)
    for name in ("equal", "max |difference|", "relative"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = ("" if value is None else f"{value:.2g}" for value in (row.difference, row.relative))
        drawn.add_row(row.step, "yes" if row.holds else "no", *numbers)
    return drawn


def _how(job: "Job") -> str:
    from async_flowrl.config.resolution import in_pixels

    how = job.settings.sampling
    scale = how.guidance_scale or how.true_cfg_scale
    return (
        f"{how.num_inference_steps} steps at {in_pixels(how.resolution)}, guidance {scale:g}, {job.model.dtype} on "
        f"{job.device.type}"
    )


if __name__ == "__main__":
    sys.exit(main())
