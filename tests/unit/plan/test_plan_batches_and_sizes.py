"""The planner with several tickets per batch, and with images of different sizes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from async_flowrl.plan.__main__ import main
from async_flowrl.plan.advise import advise
from async_flowrl.plan.calibrate import calibrate
from async_flowrl.plan.finer import finer_tickets, finer_works
from async_flowrl.plan.laws import Law
from async_flowrl.plan.limits import Limits
from async_flowrl.plan.simulate import Prediction, simulate, traced
from async_flowrl.plan.ticket_times import Batches, TicketTime, group_costs, per_call
from async_flowrl.plan.work import Layout, Work
from tests.support.recorded import recorded
from tests.support.toy import Timing, ToyRun, toy_config, virtual


def toy(k: int, hand_over: str, size: int, **timing: Any) -> tuple[Any, ToyRun]:
    """A toy run of 8 tickets per step in batches of `size`, each of which takes 1 s."""
    config = toy_config(
        k, steps=12, hand_over=hand_over, ticket_size=2, rollout__tickets_per_batch=size, reward__num_workers=4
    )
    return config, virtual(config, Timing(generate=1.0, score=0.1, update=0.7, transfer=0.0, **timing))


@pytest.mark.parametrize(("k", "hand_over"), [(0, "batch"), (1, "batch"), (1, "stream"), (2, "stream")])
@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_of_a_toy_run_in_batches_is_the_toy_run(k: int, hand_over: str, size: int) -> None:
    _, run = toy(k, hand_over, size)
    work = Work(4, Law(1.0 / size), Law(0.7), tickets_per_group=2, tickets_per_batch=size, group_size=4, score=Law(0.1))
    plan = simulate(work, Layout(2, 1, 4, k, hand_over), steps=12)
    ends = [event["ended"] for event in run.observer.of("step")]
    took = [after - before for before, after in pairwise(ends)]
    assert [after - before for before, after in pairwise(plan.ends)] == pytest.approx(took, abs=1e-6)
    alone = simulate(
        Work(4, Law(1.0 / size), Law(0.7), tickets_per_group=2, group_size=4, score=Law(0.1)),
        Layout(2, 1, 4, 0, "stream"),
        steps=12,
    )
    batched = simulate(work, Layout(2, 1, 4, 0, "stream"), steps=12)
    assert batched.step_seconds > alone.step_seconds, "a batch brings its first ticket no sooner than its last"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("slow", [1.0, 2.0])
def test_a_run_in_batches_is_learnt_from(tmp_path: Path, size: int, slow: float) -> None:
    """Of the tickets of a batch the first one's result comes after all of its time, the others' right after it."""
    config, run = toy(1, "batch", size, slow={"rollout-1": slow})
    learnt = calibrate(recorded(tmp_path / "run", run, config))
    assert learnt.work.tickets_per_batch == size
    assert learnt.work.generate.mean == pytest.approx(1.0 / size, rel=0.02)
    assert learnt.work.generate.cv == pytest.approx(0.0, abs=0.02)
    assert learnt.layout.slow == (() if slow == 1 else (1.0, pytest.approx(slow, rel=0.02)))
    ends = [event["ended"] for event in run.observer.of("step")][4:]
    took = (ends[-1] - ends[0]) / (len(ends) - 1)
    assert simulate(learnt.work, learnt.layout, steps=24).step_seconds == pytest.approx(took, rel=0.1)


def test_one_pool_makes_batches_too() -> None:
    """With one process a step takes all its tickets and all its training, whatever the batches."""
    for size in (1, 4):
        work = Work(4, Law(1.0), Law(0.5), tickets_per_group=2, tickets_per_batch=size, group_size=4)
        plan, units = traced(work, Layout(1, 1, 1, 1, "stream", placement="shared"), steps=10)
        assert plan.step_seconds == pytest.approx(8 + 2, rel=0.02)
        calls = [unit for unit in units if unit.place == "rollout-0" and unit.step == 6]
        assert len(calls) == 8 // size


def test_a_call_is_the_sum_of_its_tickets_divided_by_its_batch() -> None:
    """8 tickets per step in batches of 3; a ticket that was lost is made again, and all of its batch with it."""
    batches = [(0, 5, 2), (3, 4, 1), (6, 7), (8, 9, 10)]

    def made(worker: str, ordinal: int, seconds: float) -> TicketTime:
        (batch,) = (each for each in batches if ordinal in each)
        return TicketTime(worker, ordinal, ordinal // 8, seconds, batch)

    found = per_call(
        [
            made("rollout-0", 0, 3.0),
            made("rollout-0", 5, 0.0),
            made("rollout-1", 6, 2.0),
            made("rollout-0", 2, 0.0),
            made("rollout-1", 7, 0.0),
            made("rollout-1", 5, 3.3),
            made("rollout-0", 8, 2.7),
            made("rollout-0", 9, 0.3),
            made("rollout-0", 9, 3.0),
        ]
    )
    assert [(call.worker, call.ordinal) for call in found] == [
        ("rollout-0", 0),
        ("rollout-1", 6),
        ("rollout-1", 5),
        ("rollout-0", 8),
        ("rollout-0", 9),
    ]
    assert [call.seconds for call in found] == pytest.approx([1.0, 1.0, 1.1, 1.0, 1.0])


def costly(size: float) -> Work:
    """Groups of two sizes, of which one takes `size` times as long; a step takes 8 s of generation and of training."""
    mean = (1 + size) / 2
    return Work(8, Law(0.5), Law(1.0), tickets_per_group=2, group_size=4, costs=(1 / mean, size / mean))


def test_groups_of_two_sizes_take_as_long_as_they_should() -> None:
    work = costly(3.0)
    plan, units = traced(work, Layout(1, 1, 1, 1, "batch"), steps=60)
    tickets = [unit.end - unit.start for unit in units if unit.place == "rollout-0"]
    assert {round(seconds, 9) for seconds in tickets} == {0.25, 0.75}
    assert fmean(tickets) == pytest.approx(0.5, rel=0.05)
    by_group = list(zip(tickets[::2], tickets[1::2], strict=True))
    assert all(a == pytest.approx(b) for a, b in by_group), "a group has one size"
    updates = [unit.end - unit.start for unit in units if unit.place == "trainer-0" and unit.end > unit.start]
    assert {round(seconds, 9) for seconds in updates} == {0.5, 1.5}
    assert [b / a for (a, _), b in zip(by_group[:40], updates, strict=False)] == pytest.approx([2.0] * 40), (
        "and its training has the same"
    )
    assert plan.bounds.overlapped == pytest.approx(8.0)
    assert simulate(costly(1.0), Layout(1, 1, 1, 1, "batch"), steps=60).step_seconds < plan.step_seconds, (
        "steps with more large images are longer, and a pool waits for the other at each of them"
    )


def test_sizes_are_seen_in_the_flops_of_a_runs_tickets() -> None:
    """Tickets take 1 s and 1 s per 10 GFLOP, of which small images take 10 and large ones 30."""
    batches = Batches(1, 2)
    sizes = {0: 10e9, 1: 30e9, 2: 10e9, 3: 30e9, 4: 30e9}

    def history(flops: Mapping[int, float]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for ordinal in range(2 * len(sizes)):
            ticket = {"ordinal": ordinal, "worker": "rollout-0"}
            counted = {"flops": flops[ordinal // 2]} if flops else {}
            events.append(ticket | {"event": "span", "name": "generate", "start": 0.0, "end": 1.0} | counted)
            events.append(ticket | {"event": "ticket", "kind": "train", "state": "SCORING", "step": ordinal // 4})
        shown = {"ordinal": 0, "worker": "rollout-0"}
        return [
            *events,
            shown | {"event": "span", "name": "generate", "start": 0.0, "end": 1.0, "flops": 9e12},
            shown | {"event": "ticket", "kind": "evaluation", "state": "SCORING", "step": 0},
        ]

    times = [TicketTime("rollout-0", k, k // 4, 1.0 + sizes[k // 2] / 10e9) for k in range(2 * len(sizes))]
    mean = fmean(1.0 + flops / 10e9 for flops in sizes.values())
    expected = {group: (1.0 + flops / 10e9) / mean for group, flops in sizes.items()}
    assert group_costs(history(sizes), times, batches) == pytest.approx(expected)
    assert group_costs(history({}), times, batches) == {}, "nothing was counted"
    assert group_costs(history(dict.fromkeys(sizes, 10e9)), times, batches) == {}, "all are alike"
    assert group_costs(history(sizes), times, Batches(2, 2)) == {}, "a batch has one size"


def test_batches_get_smaller_before_tickets_do() -> None:
    """A ticket in place of one in a batch of 4 would be a quarter of the call; so a batch of 2 comes first."""
    work = Work(4, Law(1.0, 0.5), Law(0.5), tickets_per_group=2, tickets_per_batch=4, group_size=8, ticket_bytes=64)
    tried = [(w.tickets_per_batch, w.tickets_per_group, w.generate.mean, w.ticket_bytes) for w in finer_works(work)]
    assert tried == [(2, 2, 1.0, 64), (1, 2, 1.0, 64), (1, 4, 0.5, 32), (1, 8, 0.25, 16)]
    alone = [(w.tickets_per_batch, w.tickets_per_group) for w in finer_works(replace(work, tickets_per_batch=1))]
    assert alone == [(1, 4), (1, 8)]
    assert [w.tickets_per_batch for w in finer_works(replace(work, tickets_per_batch=5))][:2] == [2, 1]


def test_smaller_batches_are_recommended_before_older_samples() -> None:
    """Two uneven batches of two tickets a step: single tickets even out, as a deeper pipeline would."""
    work = Work(2, Law(0.5, 0.8), Law(0.9, 0.02), tickets_per_group=2, tickets_per_batch=2, group_size=16)
    advice = advise(work, Limits(3, split=(2, 1), share=False, steps=80))
    assert advice.chosen is not None
    (said,) = [each for each in advice.sentences if each.startswith("Smaller ")]
    assert "rollout.tickets_per_batch=1 in place of 2" in said and "if a part of a batch's images" in said
    seen: list[Work] = []

    def simulated(smaller: Work, layout: Layout) -> Prediction:
        seen.append(smaller)
        return simulate(smaller, layout, steps=80)

    found = finer_tickets(work, advice.chosen, simulated)
    assert found is not None and found.work == seen[-1] and found.sentence(advice.chosen) == said
    assert seen[0] == replace(work, tickets_per_batch=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tickets-per-batch", "99"], "plan: --tickets-per-batch 99, but a step has 16 tickets\n"),
        (["--tickets-per-batch", "2", "--costs", "1,2"], "plan: --tickets-per-batch above 1 needs images of one size"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--generate", "8", "--update", "8", *options]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_costs_of_which_only_some_have_a_share_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--generate", "8", "--update", "8", "--costs", "1:0.5,2"])
    assert "error: argument --costs: all must have a share or none" in capsys.readouterr().err


def test_the_command_knows_batches_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    pools = ["--split", "2:1", "--no-shared"]
    common = ["--generate", "8", "--update", "8", "--cv", "0", "--update-cv", "0", "--json", *pools]
    found = []
    for options in ([], ["--tickets-per-batch", "8"], ["--costs", "1,4"]):
        assert main([*common, "--steps", "16", *options]) == 0
        found.append(json.loads(capsys.readouterr().out)["depths"])
    plain, batched, mixed = ([plan["step_seconds"] for plan in each[:2]] for each in found)
    assert batched[1] > plain[1], "streamed on-policy: the first groups are there later"
    assert mixed != pytest.approx(plain, rel=1e-3)
