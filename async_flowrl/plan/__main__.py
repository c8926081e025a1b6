"""Entry point `python -m async_flowrl.plan`: the planner, which predicts a run and recommends settings for it.

It predicts step time, busy shares, staleness and bytes, and recommends a split of the devices. `--memory` plans device
memory, `--fit` lists recipes and hardware, `--rehearse` runs a configuration on tensors without values.

    python -m async_flowrl.plan --generate 40 --update 40 --sync 1 --devices 8
    python -m async_flowrl.plan --from-run outputs/one_step_off --devices 8
    python -m async_flowrl.plan --memory --config-name one_step_off experiment=qwen_image_ocr
    python -m async_flowrl.plan --fit
    python -m async_flowrl.plan --rehearse --card H100 experiment=qwen_image_ocr

`--generate` and `--update` are device-seconds per training step: the time that a single rollout worker, or a single
trainer rank, would take. Every prediction runs the real training loop with its tickets and gate, on a simulated clock
and with workers that only wait.
"""

import sys
from collections.abc import Sequence

from async_flowrl.plan.arguments import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the planner on `arguments` (None: the process's own) and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--memory" in words:
        from async_flowrl.plan.memory_report import main as report_memory

        words.remove("--memory")
        return report_memory(words)
    if "--fit" in words:
        from async_flowrl.plan.fit import main as fit

        words.remove("--fit")
        return fit(words)
    if "--rehearse" in words:
        from async_flowrl.plan.rehearsal.command import main as rehearse

        words.remove("--rehearse")
        return rehearse(words)
    given = parser().parse_args(words)
    from async_flowrl.plan.command import predict

    return predict(given)


if __name__ == "__main__":
    sys.exit(main())
