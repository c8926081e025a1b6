"""Tests of the doctor's command line and of what it says of software and devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_flowrl.cli import doctor, plan_fit
from async_flowrl.memory import devices
from async_flowrl.memory.footprints import GIB, Footprint


def test_without_options_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and " machine " in said and " optional NCCL: " in said
    assert torch.cuda.is_available() or " skipped  recipe: " in said


@pytest.mark.parametrize(("gib", "status"), [(23.5, "ok"), (8.0, "warning")])
def test_the_largest_recipe_for_the_cards_is_named_with_its_command(
    gib: float, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All need 20 GiB, here; the first of two cards is the smaller one."""
    for planned in ("planned_trainer", "planned_rollout"):
        monkeypatch.setattr(plan_fit, planned, lambda *_: Footprint({}))
        monkeypatch.setattr(devices, planned, lambda *_, **__: Footprint({"all": 10 * GIB}))
    monkeypatch.setattr(plan_fit, "resolved_on", lambda config, memory: (config, ""))
    monkeypatch.setattr(plan_fit, "LARGEST_FIRST", ("flux_1x24gb", "qwen_image_1x24gb"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (0, round((gib, 79.0)[index] * GIB)))
    assert doctor.recipe()
    said = capsys.readouterr().out
    assert said.split()[0] == status and f"2 x {gib} GiB" in said
    typed = "async-flowrl train --config-name one_step_off experiment=qwen_image_1x24gb" in said
    assert typed == (status == "ok")


@pytest.mark.parametrize(
    ("free", "capability", "status"), [(79, (9, 0), "ok"), (40, (9, 0), "warning"), (79, (7, 5), "failed")]
)
def test_devices_are_judged(
    free: int,
    capability: tuple[int, int],
    status: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: dict[str, Any] = {
        "mem_get_info": (free * GIB, 80 * GIB),
        "get_device_capability": capability,
        "get_device_name": "NVIDIA H100",
    }
    for name, value in shown.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert doctor.device(0) is (status != "failed")
    assert capsys.readouterr().out.split()[0] == status


@pytest.mark.parametrize(("free", "status"), [(5.1, "ok"), (4.9, "warning"), (0.1, "failed")])
def test_a_disk_to_which_ray_could_not_spill_is_a_warning_and_a_full_one_a_failure(
    free: float, status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = SimpleNamespace(free=free * GIB, total=100 * GIB)
    monkeypatch.setattr("async_flowrl.cli.doctor.shutil.disk_usage", lambda _: disk)
    monkeypatch.setattr("async_flowrl.cli.doctor.SMALL_SHM", 0)
    assert doctor.machine() is (status != "failed")
    assert capsys.readouterr().out.split()[0] == status
