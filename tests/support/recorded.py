"""`recorded` writes a toy run (toy.py) as a run directory, for tests of programs that read one."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.support.toy import ToyRun


def recorded(directory: Path, run: ToyRun, config: Any) -> Path:
    """Writes config.yaml, events.jsonl and metrics.jsonl of the run into the new folder `directory` and returns it."""
    directory.mkdir()
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    (directory / "events.jsonl").write_text("".join(json.dumps(e, default=str) + "\n" for e in run.observer.events))
    steps = run.observer.of("step")
    lines = [
        {"step": e["step"], "timing/step": e["ended"] - e["started"], **line}
        for e, line in zip(steps, run.lines, strict=True)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
