"""Tests of the doctor's command line and of what it says of software and devices."""

from typing import Any

import pytest
import torch

from async_flowrl.cli import doctor
from async_flowrl.run import features
from async_flowrl.run.findings import FAILED, OK, WARNING
from async_flowrl.run.machines import GIB


def test_without_options_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and " node here: " in said and " optional NCCL: " in said


@pytest.mark.parametrize(
    ("free", "capability", "status"), [(79, (9, 0), OK), (40, (9, 0), WARNING), (79, (7, 5), FAILED)]
)
def test_devices_are_judged(
    free: int, capability: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (free * GIB, 80 * GIB),
        "get_device_capability": capability,
        "get_device_name": "NVIDIA H100",
    }
    for name, value in shown.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    (finding,) = features.device_findings()
    assert (finding.name, finding.status) == ("device 0", status)
