"""The console command `async-flowrl <verb> ...`, which runs every tool of the package under one name.

Each verb is the same as `python -m <module>`.
"""

import os
import runpy
import sys
from importlib.metadata import version

from async_flowrl.config import exit_codes
from async_flowrl.config.messages import unknown_name

VERBS = {
    "train": ("async_flowrl.main", "train a configuration"),
    "data": ("async_flowrl.data", "show what is understood of a prompt file, and what would be refused"),
    "plan": ("async_flowrl.plan", "memory of a configuration, recipes and cards, and what a run measured"),
    "benchmark": ("async_flowrl.benchmark", "compare the modes on the same devices"),
    "doctor": ("async_flowrl.doctor", "say whether a configuration can start here; with --run, train two steps"),
    "evaluate": ("async_flowrl.evaluate", "score a LoRA against its base model"),
    "check-model": ("async_flowrl.check_model", "compare a model family with its stock pipeline"),
    "generate": ("async_flowrl.generate", "make images with and without a LoRA"),
    "export": ("async_flowrl.export", "write a LoRA to publish: formats, merged weights, model card"),
    "serve-rewards": ("async_flowrl.serve_rewards", "serve rewards over HTTP, to any trainer"),
    "report": ("async_flowrl.report", "write one page about a run, or several"),
    "verify": ("async_flowrl.verify", "check a finished run from its files"),
}
"""Verb → module that is run as a program, and a line about it for --help."""


def main() -> int:
    """Runs the verb's module with the remaining arguments; the module's exit code becomes the command's."""
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
    runpy.run_module(VERBS[verb][0], run_name="__main__", alter_sys=True)
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
