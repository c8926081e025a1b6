"""Run directories with files as a run writes them, for tests of the report's document."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from async_flowrl.observability.evaluations import Curve, Evaluation
from async_flowrl.observability.images import write_images
from async_flowrl.report.pictures import folder_of

WORDS = ("a cat", "</script><b>", "\u202eقط")


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(version: int, rise: float) -> Evaluation:
    """Scores of three prompts, two images each, that rise alike."""
    scores = {place: (0.1 * place + rise, 0.1 * place + 1.1 * rise) for place in range(3)}
    return Evaluation(version, False, "s", 4, 1.0, {"reward": Curve("trained", 1.0, "t", scores)})


def make_run(root: Path, steps: int = 6, *, workers: int = 1, evaluations: int = 3, config: str = "") -> Path:
    """A run directory as the program writes it: each step a second of rollout, then one of training."""
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(config or f"name: x\ntotal_steps: {steps}\nplacement: separate\ngroup_size: 4\n")
    kept = {"kept/0": 3, "kept_of/0": 4, "kept_of/1": 4}
    lines(
        root / "metrics.jsonl",
        [
            {"step": s, "reward/mean": s / steps, "images": 4, "timing/step": 2.0, "kl": None, **kept}
            for s in range(steps)
        ],
    )
    events: list[dict[str, Any]] = []
    for s in range(steps):
        t = 100.0 + 2 * s
        for w in range(workers):
            events.append({"time": t, "event": "state", "worker": f"rollout-{w}", "state": "busy"})
            span = {"event": "span", "worker": f"rollout-{w}", "name": "generate", "start": t, "end": t + 1}
            events.append({"time": t + 1, **span})
            events.append({"time": t + 1, "event": "state", "worker": f"rollout-{w}", "state": "idle"})
        events.append({"time": t, "event": "state", "worker": "trainer-0", "state": "wait_data"})
        span = {"event": "span", "worker": "trainer-0", "name": "forward", "start": t + 1, "end": t + 2}
        events.append({"time": t + 2, **span})
        ticket = {"event": "ticket", "kind": "train", "ordinal": s, "step": s, "group": 0}
        events += [{"time": t + 1, **ticket, "state": state} for state in ("SCORING", "READY")]
        events.append({"time": t + 2, **ticket, "state": "TRAINED"})
        events.append({"time": t + 2, "event": "step", "step": s, "started": t, "ended": t + 2})
    lines(root / "events.jsonl", events)
    found = [evaluation(round(i * steps / max(1, evaluations - 1)), 0.2 * i) for i in range(evaluations)]
    lines(root / "evaluations.jsonl", [asdict(each) for each in found])
    for each in found:
        images = {place: np.full((2, 16, 16, 3), 20 * place, dtype=np.uint8) for place in range(3)}
        details = [{"prompt": text, "extras": {"ocr": {"read": ("A", "B")}}} for text in WORDS]
        write_images(root / "images" / folder_of(each), images, details, most=4, side=64)
    return root
