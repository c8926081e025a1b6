"""Tests of evaluations: held-out terms, records, metrics, warnings, and the best version."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from async_flowrl.config.schema import Config, EvaluateConfig, HeldOutConfig, RewardConfig, RewardTerm, SaveConfig
from async_flowrl.controller.evaluation import EvaluationRecords, EvaluationResult
from async_flowrl.observability.evaluations import EvaluationLog
from async_flowrl.observability.images import LINE_HEIGHT
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.training.checkpoint import Checkpoint, checkpoint_step, write_checkpoint, written
from async_flowrl.types import Failure, Prompt, Sampling, Scores
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import no_fault


def config_of(on_hacking: str = "warn", best: str | None = None) -> Config:
    return Config(
        total_steps=40,
        reward=RewardConfig(terms={"size": RewardTerm(name="jpeg_compressibility")}),
        evaluate=EvaluateConfig(
            every=10,
            on_hacking=on_hacking,
            reward=HeldOutConfig(terms={"ocr": RewardTerm(), "blue": RewardTerm(weight=0)}),
        ),
        save=SaveConfig(best=best),
    )


PROMPTS, IMAGES = 12, 2

TERMS = {"good": RewardTerm(), "later": RewardTerm(), "never": RewardTerm()}


def evaluated(fault: Callable[[str, str, int], str | None] = no_fault, **held_out: RewardTerm) -> ToyRun:
    config = toy_config(evaluate__every=3, evaluate__before_training=True)
    config.evaluate.reward = HeldOutConfig(terms=held_out)
    return virtual(config, fault=fault)


def test_held_out_terms_score_evaluations_only_and_change_no_weights() -> None:
    plain, found = evaluated(), evaluated(**TERMS)
    assert found.digest == plain.digest and [r.version for r in found.evaluated] == [r.version for r in plain.evaluated]
    for result in found.evaluated:
        assert sorted(result.held_out) == [0, 1] and result.unscored == 0
        for place, scores in result.held_out.items():
            assert set(scores.by_term) == {"good", "later"} and scores.failed == {"never": Failure("never failed")}
            assert scores.by_term["good"] == result.scores[place].by_term["color"]
            assert {name: extras["mean_grey"] for name, extras in scores.extras.items()} == scores.by_term
    skipped = found.observer.of("skipped", kind="evaluation")
    assert len(skipped) == 2 * len(found.evaluated) and all("never failed" in e["message"] for e in skipped)


class Told:
    """Monitor and observer that keep what they are told."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.events: list[dict[str, Any]] = []
        self.stopped: list[str] = []

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        self.evaluations.append((version, metrics))

    def image(self, path: Path, version: int) -> None:
        assert path.is_file()

    def samples(self, *anything: Any, **more: Any) -> None:
        """Single pictures, for views that show them."""

    def event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})


def records(root: Path, config: Config, told: Told) -> EvaluationRecords:
    directory = RunDirectory(root)
    directory.images.mkdir(parents=True, exist_ok=True)
    metrics = MetricsLog(directory.metrics)
    if not metrics.read():
        for step in range(40):
            metrics.append(step, {})
    log = EvaluationLog(directory.evaluations)
    return EvaluationRecords(
        config, directory, metrics, cast("Any", told), log, cast("Any", told), [], told.stopped.append
    )


def result(version: int, reward: float, ocr: float, *, lacking: int = 0) -> EvaluationResult:
    """Scores around the two levels, the same for every call but for some noise of the version's own."""
    rng, own = np.random.default_rng(5), np.random.default_rng(version)
    shared = rng.normal(0, 0.2, (PROMPTS, IMAGES))
    trained, held = (shared + level + own.normal(0, 0.05, (PROMPTS, IMAGES)) for level in (reward, ocr))
    images = own.integers(0, 256, (PROMPTS, IMAGES, 8, 8, 3), dtype=np.uint8)
    prompts = tuple(Prompt(index, f"prompt {index}") for index in range(PROMPTS))
    return EvaluationResult(
        version,
        prompts,
        tuple(images),
        tuple(Scores(tuple(row), {"size": tuple(row)}) for row in trained.tolist()),
        indices=tuple(range(PROMPTS)),
        held_out={
            place: Scores((), {}, failed={"ocr": Failure("no answer")})
            if place < lacking
            else Scores((), {"ocr": tuple(row)})
            for place, row in enumerate(held.tolist())
        },
        sampling=Sampling(8, 6, 1.0, 0.0, " ", "ode", 0.0),
        setting="same",
    )


def test_what_held_out_terms_say_reaches_metrics_and_pictures_and_is_there_after_a_restart(tmp_path: Path) -> None:
    """Only the first prompt has extras: of the second one the held-out term has failed."""
    plain, told = result(10, 0.5, 0.5, lacking=PROMPTS), Told()
    spoken = Scores((), {"ocr": (1.0, 0.0)}, extras={"ocr": {"sure": (0.5, 0.25), "read": ("STOP", "ST0P")}})
    found = records(tmp_path, config_of(), told)
    found.show(EvaluationResult(**{**vars(plain), "held_out": {**plain.held_out, 0: spoken}}))
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[9])
    assert line["evaluation/held_out/ocr/extra/sure"] == 0.375
    assert dict(told.evaluations)[10]["held_out/ocr/extra/sure"] == 0.375
    assert records(tmp_path, config_of(), Told()).metric_keys(9) == found.metric_keys(9)
    index = json.loads((tmp_path / "images" / "step_000010" / "index.json").read_text())["prompts"]
    assert [each["extras"] for each in index[:2]] == [{"ocr": {"read": ["STOP", "ST0P"], "sure": [0.5, 0.25]}}, {}]
    grid = Image.open(tmp_path / "images" / "step_000010.png")
    found.show(EvaluationResult(**{**vars(plain), "version": 20}))
    silent = Image.open(tmp_path / "images" / "step_000020.png")
    assert grid.height == silent.height + PROMPTS * LINE_HEIGHT, "a line more below every image"


def test_a_run_killed_while_its_metrics_are_amended_makes_the_evaluation_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = records(tmp_path, config_of(), Told())
    with monkeypatch.context() as killed:
        killed.setattr(found.metrics, "amend", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            found.show(result(10, 0.5, 0.5))
    again = records(tmp_path, config_of(), Told())
    assert not again.log.records
    again.show(result(10, 0.5, 0.5))
    assert "evaluation/reward/mean" in again.metrics.read()[9]


CURVE = ((0, 0.0, 0.8), (10, 0.3, 0.9), (20, 0.6, 0.3), (30, 0.9, 0.1))
"""Version, trained reward, held-out score: the best is version 10, and the alarm is due at 20."""


def shown(found: EvaluationRecords, *points: tuple[int, float, float]) -> EvaluationRecords:
    for point in points:
        found.show(result(*point))
    return found


def test_the_alarm_warns_once_per_curve_is_an_event_and_stops_only_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    with caplog.at_level(logging.WARNING):
        shown(records(tmp_path / "warn", config_of(), told), *CURVE)
    warned = [r.getMessage() for r in caplog.records if "reward hacking?" in r.getMessage()]
    assert len(warned) == 1 and "ocr" in warned[0] and "to 20" in warned[0]
    assert [(e["event"], e["curve"], e["version"]) for e in told.events] == [
        ("hacking", "ocr", 20),
        ("hacking", "ocr", 30),
    ]
    assert told.stopped == []
    stopping, ignoring = Told(), Told()
    shown(records(tmp_path / "stop", config_of("stop"), stopping), *CURVE[:3])
    assert stopping.stopped == ["evaluate.on_hacking=stop at version 20"]
    shown(records(tmp_path / "ignore", config_of("ignore"), ignoring), *CURVE)
    assert ignoring.events == ignoring.stopped == []


def test_the_checkpoints_of_the_best_version_and_of_those_not_evaluated_yet_are_spared(tmp_path: Path) -> None:
    found = records(tmp_path / "run", config_of(best="ocr"), Told())
    assert 0 in found.spare(), "the evaluation before training is still to come"
    shown(found, *CURVE[:3])
    assert found.spare() == [10, 30, 40]
    folder = tmp_path / "checkpoints"
    for version in (0, 10, 20, 30):
        write_checkpoint(folder, version, Checkpoint({}, {}, {}), keep=1, spare=found.spare())
    assert sorted(map(checkpoint_step, written(folder))) == [10, 30]
    assert records(tmp_path / "other", config_of(), Told()).spare() == []
