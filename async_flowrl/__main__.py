"""The command `async-flowrl VERB ...`, or `python -m async_flowrl VERB ...`: every tool of the package under one name.

`python -m async_flowrl.main ...` is the same as `async-flowrl train ...`.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn, cast

from async_flowrl.config import exit_codes
from async_flowrl.config.error_text import unknown_name
from async_flowrl.observability.terminal import run_program

# Verb → module of this package whose `main` it calls, and a line about it for --help.
VERBS = {
    "train": ("main", "train a configuration"),
    "data": ("cli.data", "show what is understood of a prompt file, and what would be refused"),
    "plan": ("cli.plan", "memory of a configuration, recipes and cards, and what a run measured"),
    "benchmark": ("cli.benchmark", "compare the modes on the same devices"),
    "doctor": ("cli.doctor", "say whether a configuration can start here; with --run, train two steps"),
    "evaluate": ("cli.evaluate", "score a LoRA against its base model"),
    "check-model": ("cli.check_model", "compare a model family with its stock pipeline"),
    "generate": ("cli.generate", "make images with and without a LoRA"),
    "export": ("cli.export", "write a LoRA to publish: formats, merged weights, model card"),
    "serve-rewards": ("cli.serve_rewards", "serve rewards over HTTP, to any trainer"),
    "report": ("cli.report", "write one page about a run, or several"),
    "verify": ("cli.verify", "check a finished run from its files"),
}


def main() -> int:
    """Calls the verb's `main` with the remaining arguments and returns its exit code."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("--help", "-h"):
        lines = [f"  {name:13} {what}" for name, (_, what) in VERBS.items()]
        sys.stdout.write("\n".join(["usage: async-flowrl <verb> [arguments]", "", *lines, ""]))
        return exit_codes.OK
    if verb == "--version":
        sys.stdout.write(f"async-flowrl {version('async-flowrl')}\n")
        return exit_codes.OK
    if verb not in VERBS:
        sys.stderr.write(f"async_flowrl: {unknown_name('the verb', verb, VERBS)}\n")
        return exit_codes.CONFIG
    del sys.argv[1]
    sys.path.insert(0, os.getcwd())  # as `python -m` does it: users' own rewards and models are imported from there
    return cast("int", import_module(f"async_flowrl.{VERBS[verb][0]}").main())


def program() -> NoReturn:
    run_program(main)


if __name__ == "__main__":
    program()
