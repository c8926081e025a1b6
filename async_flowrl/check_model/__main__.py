"""The command `async-flowrl check-model NAME_OR_PATH`: arguments, and the table of compared steps."""

import argparse
from collections.abc import Sequence

from async_flowrl.config.schema import TinyConfig
from async_flowrl.observability.terminal import run_program


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
    option("--dtype", choices=("bfloat16", "float32"), default="float32", help="default float32: no rounding")
    option("--max-sequence-length", type=int, help="model.max_sequence_length")
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares a family as `arguments` say (None: the process's own) and returns the exit code."""
    given = parser().parse_args(arguments)  # before torch is imported, so that help and errors appear at once
    from async_flowrl.check_model.compare import run

    return run(given)


if __name__ == "__main__":
    run_program(main)
