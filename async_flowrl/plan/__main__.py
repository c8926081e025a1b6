"""Entry point `python -m async_flowrl.plan`: the planner.

`--memory` plans device memory, `--fit` lists recipes and hardware, `--rehearse` runs a configuration on tensors without
values, and `--from-run` says what a run measured, what limits it, and what to change.

    python -m async_flowrl.plan --memory --config-name one_step_off experiment=qwen_image_ocr
    python -m async_flowrl.plan --fit
    python -m async_flowrl.plan --rehearse --card H100 experiment=qwen_image_ocr
    python -m async_flowrl.plan --from-run outputs/one_step_off --devices 8
"""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the planner on `arguments` (None: the process's own) and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--memory" in words:
        from async_flowrl.plan.memory import main as report_memory

        words.remove("--memory")
        return report_memory(words)
    if "--fit" in words:
        from async_flowrl.plan.fit import main as fit

        words.remove("--fit")
        return fit(words)
    if "--rehearse" in words:
        from async_flowrl.plan.rehearse import main as rehearse

        words.remove("--rehearse")
        return rehearse(words)
    from async_flowrl.plan.from_run import add_arguments
    from async_flowrl.plan.from_run import main as from_run

    parser = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan", description="Plan a configuration, or learn from a run."
    )
    add_arguments(parser)
    for option in ("--memory", "--fit", "--rehearse"):
        parser.add_argument(option, action="store_true", help="has options of its own: add --help")
    given = parser.parse_args(words)
    if given.from_run is None:
        parser.error("one of --memory, --fit, --rehearse and --from-run RUN_DIR is needed")
    return from_run(given)


if __name__ == "__main__":
    sys.exit(main())
