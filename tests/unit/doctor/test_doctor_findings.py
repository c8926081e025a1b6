"""Tests of the conclusions that the doctor's checks draw from numbers, without a device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.doctor import machine, pools, runs, transports
from async_flowrl.doctor.determinism import judged, without
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, WARNING
from async_flowrl.doctor.model import overrides
from async_flowrl.doctor.pools import GIB, Worked
from async_flowrl.doctor.runs import Ran
from async_flowrl.doctor.setting import Setting
from async_flowrl.memory.processes import Footprint
from async_flowrl.tickets.arithmetic import check_batching

CARD = Setting(1, "NVIDIA H100", quick=False, work="", logs="")
CARDS = Setting(2, "NVIDIA H100", quick=False, work="", logs="")
REHEARSED = Setting(2, "NVIDIA H100 (pretended)", quick=False, work="", logs="")


def test_bits_that_differ_are_told_apart_by_where_they_differ() -> None:
    twice = {"same": ["a", "a"], "once": ["a", "b"], "elsewhere": ["a", "a"], "none": ["refused: no such form"] * 2}
    beside = {"same": ["a"], "once": ["a"], "elsewhere": ["b"], "none": ["refused: no such form"]}
    same, once, elsewhere, none = judged(twice, beside)
    assert same.status == OK
    assert once.status == FAILED and once.sentence == "other bits the second time in one process"
    assert elsewhere.status == FAILED and elsewhere.sentence == "other bits in another process"
    assert none.status == FAILED and none.sentence == "refused: no such form"
    assert all("bit for bit" in finding.advice for finding in (once, elsewhere, none))


def test_what_does_not_repeat_without_deterministic_kernels_is_information() -> None:
    finding = without({"attention": ["a", "b"], "product": ["a", "a"]})
    assert finding.status == OK and finding.sentence.startswith("does not repeat: attention (")


@pytest.mark.parametrize(("peak", "status"), [(10.0, OK), (9.2, OK), (10.8, OK), (8.0, WARNING), (11.5, FAILED)])
def test_a_plan_that_is_too_small_fails_and_one_that_is_too_large_warns(peak: float, status: str) -> None:
    worked = Worked(peak=int(peak * GIB), seconds=1.0, flops=None, images=1)
    finding = pools.memory_finding("trainer rank", worked, Footprint({"weights": 10 * GIB}))
    assert finding.status == status
    assert f"ratio {10 / peak:.3f}" in finding.sentence


def test_small_peaks_are_not_judged() -> None:
    worked = Worked(peak=GIB // 2, seconds=1.0, flops=None, images=1)
    assert pools.memory_finding("trainer rank", worked, Footprint({"weights": GIB})).status == OK


def test_speed_is_a_share_of_the_devices_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "device_peak", lambda: 1e12)
    worked = Worked(peak=1, seconds=2.0, flops=1e12, images=16)
    good = pools.speed_finding("rollout worker", worked, CARD, what="images")
    assert good.status == OK and good.sentence == "8 images/s, MFU 50.0%"
    slow = pools.speed_finding("rollout worker", Worked(1, 20.0, 1e12, 16), CARD, what="images")
    assert slow.status == WARNING and "nvidia-smi" in slow.advice
    assert pools.speed_finding("rollout worker", worked, REHEARSED, what="images").status == SKIPPED
    monkeypatch.setattr(pools, "device_peak", lambda: None)
    assert "MFU not known" in pools.speed_finding("trainer rank", worked, CARD, what="samples").sentence


def cell(fallbacks: int = 0) -> dict[str, Any]:
    seconds = {"delivery_seconds": 0.2, "primitive_seconds": 0.1, "stall_seconds": 0.004}
    return {"megabytes": 1700.0, **seconds, "stats": {"fallbacks": fallbacks}}


def test_a_delivery_is_told_in_gigabytes_per_second() -> None:
    finding = transports.delivered("transport nccl", {"cells": [cell()], "skipped": []}, "advice")
    assert finding.status == OK
    assert "8.50 GB/s; the raw primitive 17.00 GB/s), trainer stalled 4.0 ms" in finding.sentence
    assert transports.delivered("x", {"cells": [cell(2)], "skipped": []}, "advice").status == FAILED
    left_out = transports.delivered("x", {"cells": [], "skipped": ["needs 2 GPUs"]}, "advice")
    assert left_out.status == SKIPPED and left_out.sentence == "needs 2 GPUs"


def ran(digest: str = "abc", *, seconds: float = 2.0, fallbacks: int = 0, member_busy: int = 0) -> Ran:
    return Ran(digest, seconds, 16 / seconds, publishes=8, fallbacks=fallbacks, member_busy=member_busy)


def test_runs_that_end_with_other_weights_fail() -> None:
    assert runs.repeats(ran(), ran()).status == OK
    other = runs.repeats(ran("abc"), ran("abd"))
    assert other.status == FAILED and "determinism" in other.advice


def test_a_version_that_did_not_go_by_nccl_fails() -> None:
    assert runs.collective(ran(), CARDS).sentence == "all 8 versions by NCCL"
    assert runs.collective(ran(fallbacks=3), CARDS).status == FAILED
    assert runs.collective(ran(), CARD).status == SKIPPED


def test_a_version_for_which_nccl_was_not_used_does_not_fail_unless_it_was_never_used() -> None:
    some = runs.collective(ran(member_busy=2), CARDS)
    assert some.status == OK and some.sentence.startswith("6 of 8 versions by NCCL")
    assert runs.collective(ran(member_busy=8), CARDS).status == FAILED
    assert runs.collective(ran(member_busy=2, fallbacks=1), CARDS).status == FAILED


def test_modes_are_compared_where_both_were_timed() -> None:
    both = runs.modes(CARDS, {"first": ran(seconds=2.0), "sync": ran(seconds=3.0)})
    assert both.status == OK and "1.50 times as fast, on separate devices" in both.sentence
    assert "no gain is expected" in runs.modes(CARD, {"first": ran(), "sync": ran()}).sentence
    assert runs.modes(CARDS, {"first": ran()}).status == SKIPPED
    assert runs.modes(REHEARSED, {"first": ran(), "sync": ran()}).status == SKIPPED


def test_a_run_is_read_from_what_it_wrote(tmp_path: Path) -> None:
    sync = {"publishes": 4, "fallbacks": 1, "member_busy": 2}
    summary = {"weights_digest": "abc", "images": 64, "steps": 4, "sync": sync}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [{"step": step, "timing/step": seconds} for step, seconds in enumerate((9.0, 7.0, 2.0, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.read(tmp_path) == Ran("abc", 2.0, 8.0, publishes=4, fallbacks=1, member_busy=2)


def test_pools_share_one_device_and_have_one_each_where_there_are_two() -> None:
    assert "rollout.gpus_per_worker=0.5" in runs.placed(CARD, "one_step_off")
    assert "placement=shared" in runs.placed(CARD, "sync")
    assert "checkpoint_engine.transport=nccl" in runs.placed(CARDS, "sync")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("mode", ["one_step_off", "sync"])
def test_runs_are_configurations_that_are_accepted(mode: str, quick: bool, devices: int, tmp_path: Path) -> None:
    given = Setting(devices, "NVIDIA H100", quick, str(tmp_path), str(tmp_path))
    if not quick or mode != "sync":
        config = compose_config(mode, [*overrides(given), *runs.placed(given, mode), f"output_dir={tmp_path}/run"])
        check(config)
        check_batching(config)


def found(**changed: object) -> dict[str, Any]:
    known = {"index": 0, "name": "NVIDIA H100", "capability": [9, 0], "memory": 80 * GIB, "free": 79 * GIB}
    return {**known, "numa": None, "peers": [], **changed}


def test_devices_that_are_too_old_fail_and_those_in_use_warn() -> None:
    assert machine.device_finding(found()).status == OK
    assert machine.device_finding(found(capability=[7, 5])).status == FAILED
    assert machine.device_finding(found(free=40 * GIB)).status == WARNING
    assert "says anything about a GPU" in machine.device_finding(found(name="H100 (pretended)")).advice


def test_devices_that_do_not_reach_each_other_are_named() -> None:
    pair = [found(index=0, peers=[1]), found(index=1, peers=[])]
    finding = machine.peers_finding(pair)
    assert finding.status == WARNING and finding.sentence == "none from 1 → 0"
    assert machine.peers_finding([found(index=0, peers=[1]), found(index=1, peers=[0])]).status == OK
    assert machine.peers_finding([found()]).status == SKIPPED


def test_versions_name_what_is_installed() -> None:
    assert machine.versions()["torch"] == torch.__version__
    assert {"Python", "ray", "diffusers", "peft"} <= machine.versions().keys()
