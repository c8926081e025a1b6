"""Plugin of pytest for every test that runs on pretended GPUs: `-p tests.pretend_gpu.plugin`."""

import os
from collections.abc import Iterator

import pytest
import torch
from pretended import report

os.environ["PRETEND_NCCL_WATCHDOG"] = "report"  # of this process only: the tests' group would end pytest
os.environ["PRETEND_SHARED_DEVICE"] = "yes"  # ranks that unit tests spawn all take their first one


@pytest.fixture(autouse=True)
def no_race(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails by unordered accesses of device memory, and by what torch's watchdog would have ended it for.

    A test that plants such a thing calls `report.forget()` when it has seen it.
    """
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    report.forget()
    yield
    for kind in (report.RACE, report.KILLED):
        found = report.seen(kind)
        assert not found, f"{kind}: " + "; ".join(f"{count} x {one}" for one, count in found.most_common(5))
