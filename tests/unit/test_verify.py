"""Tests of `verify`: it accepts a real run's files and finds each kind of tampering."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from async_flowrl.cli.verify import main, verify
from async_flowrl.training.checkpoint import Checkpoint, write_checkpoint
from checkpoint_engine import weights_digest
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import once

STEPS = 5
Record = dict[str, Any]
INPUTS: Record = {"event": "inputs", "time": 0.0, "train": "0" * 64, "train_prompts": 4, "forced": []}
"""What a run records of its prompts before its loop, which is all that a toy run is."""


@pytest.fixture(scope="module")
def finished() -> ToyRun:
    config = toy_config(1, steps=STEPS, evaluate__every=2)
    found = virtual(config, fault=once("rollout-0", "generate", 3, "kill"))
    found.observer.events.insert(0, INPUTS)
    return found


def write_run(root: Path, found: ToyRun, events: list[Record]) -> Path:
    """The files of a run directory that `verify` reads."""
    tensors = found.groups["trainer"].workers[0].target.tensors
    published = {str(version): digest for version, digest in found.published().items() if version >= STEPS - 1}
    trainer = {"version": STEPS, "weights_digest": weights_digest(tensors), "lora": {"alpha": 4.0, "rank": 2}}
    parts = {"weights": tensors, "retained": {f"{STEPS}/{name}": tensor for name, tensor in tensors.items()}}
    write_checkpoint(root / "checkpoints", STEPS, Checkpoint(parts, trainer, {"published": published}), keep=2)
    summary = {"max_staleness": 1, "steps": STEPS, "weights_digest": weights_digest(tensors)}
    (root / "summary.json").write_text(json.dumps(summary))
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found.lines))
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return root


def rows(root: Path) -> dict[str, tuple[bool, str]]:
    return {name: (ok, text) for name, ok, text in verify(root)}


def test_an_honest_run_passes(tmp_path: Path, finished: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_run(tmp_path, finished, finished.observer.events)
    assert main([str(root)]) == 0
    out = capsys.readouterr().out
    assert "4 tickets of age 0, 16 tickets of age 1" in out
    assert "20 tickets in 5 steps" in out
    assert "6 versions, " in out
    assert rows(root)["digests"] == (True, f"step_5: {finished.digest[:16]}")
    assert rows(root)["inputs"][1].startswith("4 training prompts, whose file cannot be compared here")


def test_a_resumed_run_passes_and_its_undone_steps_do_not_count(tmp_path: Path, finished: ToyRun) -> None:
    """Killed in step 3, resumed from checkpoint 2: steps 2 and on happen twice."""
    events = finished.observer.events
    killed = next(i for i, e in enumerate(events) if e["event"] == "step" and e["step"] == 3)
    again = [e for e in events if e.get("step", 99) >= 2 or e.get("version", 0) >= 1 or e["event"] == "rollback"]
    history = [*events[:killed], {"event": "rollback", "time": 0.0, "step": 2}, *again]
    root = write_run(tmp_path, finished, history)
    assert {name for name, (ok, _) in rows(root).items() if ok} == set(rows(root)), rows(root)
    forgotten = [e for e in history if e["event"] != "rollback"]
    assert not rows(write_run(tmp_path, finished, forgotten))["exactly once"][0]
    for began in (elsewhere := history[killed] | {"elsewhere": True}, history[killed]):
        write_run(tmp_path, finished, [began, INPUTS, *again])
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in finished.lines[2:]))
        # The first steps are another run's, or their events are lost.
        assert all(ok for ok, _ in rows(tmp_path).values()) == (began is elsewhere), rows(tmp_path)
    anew = [elsewhere, history[killed] | {"step": 0}]  # killed there before it had a checkpoint of its own
    assert rows(write_run(tmp_path, finished, [*anew, *events]))["exactly once"][0]


def last(events: list[Record], state: str) -> int:
    return max(i for i, e in enumerate(events) if e.get("state") == state and e.get("kind", "train") == "train")


def change(state: str, **fields: Any) -> Callable[[list[Record]], list[Record]]:
    """The last training ticket's transition into `state` gets other fields."""

    def apply(events: list[Record]) -> list[Record]:
        index = last(events, state)
        return [*events[:index], events[index] | fields, *events[index + 1 :]]

    return apply


def drop(state: str) -> Callable[[list[Record]], list[Record]]:
    return lambda events: [event for i, event in enumerate(events) if i != last(events, state)]


def double(state: str) -> Callable[[list[Record]], list[Record]]:
    return lambda events: [*events, next(e for e in events if e.get("state") == state and e.get("kind") == "train")]


def swap(events: list[Record]) -> list[Record]:
    """A ticket of step 0 changes places with one of step 1; inside a step the order would be free."""
    trained = [i for i, e in enumerate(events) if e.get("state") == "TRAINED" and e["kind"] == "train"]
    first, second = trained[0], next(i for i in trained if events[i]["step"] == 1)
    events = list(events)
    events[first], events[second] = events[second], events[first]
    return events


def early(events: list[Record]) -> list[Record]:
    """The last ticket is handed over as soon as the first one is trained."""
    handed = last(events, "HANDED")
    trained = next(i for i, e in enumerate(events) if e.get("state") == "TRAINED" and e["kind"] == "train")
    return [*events[: trained + 1], events[handed], *events[trained + 1 : handed], *events[handed + 1 :]]


def evaluated_elsewhere(events: list[Record]) -> list[Record]:
    tampered = [dict(event) for event in events]
    next(e for e in tampered if e.get("kind") == "evaluation" and e["state"] == "TRAINED")["digest"] = "0" * 64
    return tampered


@pytest.mark.parametrize(
    ("tamper", "check", "text"),
    [
        (change("TRAINED", version=2), "bound", "is 2 versions old"),
        (change("TRAINED", version=4), "bound", "is 0 versions old"),
        (change("TRAINED", version=5), "bound", "is -1 versions old"),
        (double("TRAINED"), "exactly once", r"tickets \[0\] were finished more than once"),
        (drop("TRAINED"), "exactly once", "5 steps should have equally many tickets"),
        (change("TRAINED", ordinal=77), "exactly once", "were never finished"),
        (swap, "exactly once", "ticket 4 was finished without having been handed over"),
        (early, "exactly once", "ticket 19 of step 4 was handed over before step 3 had ended"),
        (change("HANDED", step=3), "exactly once", "ticket 19 belongs to step 4, and stands in step 3"),
        (change("TRAINED", digest="0" * 64), "version chain", "was made with weights never sent"),
        (change("sent", digest="0" * 64), "digests", "another digest for version 5"),
        (drop("sent"), "version chain", r"versions \[5\] were never sent"),
        (change("acknowledged", digest="0" * 64), "version chain", "acknowledged other bytes as version 5"),
        (evaluated_elsewhere, "version chain", "evaluation ticket . was made with weights never sent"),
        (lambda events: events[1:], "inputs", "does not say which prompts were trained"),
        (lambda events: [*events, INPUTS | {"forced": ["other prompts"]}], "inputs", "resume=force: other prompts"),
        (lambda events: [*events, INPUTS | {"train": "1" * 64}], "inputs", "2 different sets of prompts"),
    ],
)
def test_tampered_events_are_noticed(
    tamper: Callable[[list[Record]], list[Record]], check: str, text: str, tmp_path: Path, finished: ToyRun
) -> None:
    root = write_run(tmp_path, finished, tamper(finished.observer.events))
    ok, found = rows(root)[check]
    assert not ok
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(found)
    assert main([str(root)]) == 1


def test_other_masters_than_the_summarys_and_damaged_ones_are_noticed(tmp_path: Path, finished: ToyRun) -> None:
    root = write_run(tmp_path, finished, finished.observer.events)
    tensors = finished.groups["trainer"].workers[0].target.tensors
    other = {name: tensor + 1e-7 for name, tensor in tensors.items()}
    for digest, said in ((weights_digest(other), "summary.json says"), ("x", "says x")):
        damaged = Checkpoint({"weights": other}, {"weights_digest": digest}, {})
        write_checkpoint(root / "checkpoints", STEPS, damaged, keep=2)
        ok, text = rows(root)["digests"]
        assert not ok and said in text
    path = root / "checkpoints" / f"step_{STEPS}" / "weights.safetensors"
    tensors = load_file(path)
    tensors["layer.lora_B.weight"][0, 0] += 1.0
    save_file(tensors, path)
    assert rows(root)["digests"] == (False, "there is no sound checkpoint")
