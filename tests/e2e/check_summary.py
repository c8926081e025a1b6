"""check_summary.py RUN_DIR MODE STEPS: exits with the first broken assertion about a finished run."""

import json
import sys
from pathlib import Path

from async_flowrl.cli.verify import verify

STALENESS = {"sync": 0, "stream": 0, "one_step_off": 1, "fully_async": 2}


def main() -> None:
    run, mode, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bound = STALENESS[mode]
    assert not (broken := [row for row in verify(run) if not row[1]]), broken
    assert (summary["steps"], summary["mode"], summary["tickets"]["failed"]) == (steps, mode, 0)
    assert [line["staleness/max"] for line in lines] == [min(step, bound) for step in range(steps)]
    assert summary["staleness_max"] == min(bound, steps - 1), summary["staleness_max"]
    assert summary["sync"]["publishes"] == steps + 1, summary["sync"]
    for pool, seconds in summary["pools"].items():
        share = sum(seconds.values()) / summary["wall_seconds"]
        assert abs(share - 1) < 0.02, (pool, share)
    for name in ("lora/pytorch_lora_weights.safetensors", "report.html", "timeline.json", "config.yaml"):
        assert (run / name).stat().st_size > 0, name
    print(f"{mode}: digest {summary['weights_digest'][:16]}, {summary['images_per_s']:.1f} images/s")


if __name__ == "__main__":
    main()
