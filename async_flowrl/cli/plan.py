"""async-flowrl plan: `--memory`, `--fit` (recipes and hardware), `--rehearse` (on fake tensors) or `--from-run`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from async_flowrl.observability.terminal import refuse

# Option → the module of this folder whose `main` it runs; without one of them it is that of `--from-run`.
MODES = {"--memory": "plan_memory", "--fit": "plan_fit", "--rehearse": "rehearse"}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    option = next((mode for mode in MODES if mode in words), None)
    module = import_module(f"async_flowrl.cli.{MODES[option] if option else 'plan_from_run'}")
    try:
        module.main([word for word in words if word != option])
    except ValueError as error:
        return refuse(error)
    except MemoryError as error:  # the bytes of a version are real host memory in a rehearsal too
        return refuse(f"this machine has too little memory for the rehearsal: {error}")
    return 0
