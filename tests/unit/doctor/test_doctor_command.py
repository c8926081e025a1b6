"""Tests of the doctor's command line and of what it says of software and devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_flowrl.cli import doctor
from async_flowrl.memory.footprints import GIB


def test_without_options_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and " machine " in said and " optional NCCL: " in said


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
