"""Test of the probe of expandable segments: where the driver cannot map memory, a worker goes on without them."""

import logging
import os

import pytest

from separation.worker_process import ALLOCATOR_NAMES, ProcessHost, RemoteError


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("own_settings", [False, True])
def test_a_worker_expands_segments_only_where_the_driver_can(
    maps: bool, own_settings: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*ALLOCATOR_NAMES, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
    if not maps:
        monkeypatch.setenv("PRETEND_NO_MAPPING", "1")
    expanding = "expandable_segments:True"
    environment = {ALLOCATOR_NAMES[0]: expanding} if own_settings else {}
    host = ProcessHost("worker", threads=1, environment=environment, expandable_segments=True, log_file=None)
    arguments = {"size": (3,), "device": "cuda"}
    with caplog.at_level(logging.WARNING):
        if own_settings and not maps:
            with pytest.raises(RemoteError, match="operation not supported"):
                host.build("torch:zeros", arguments)
            return
        host.build("torch:zeros", arguments)
    assert host.run("sum").item() == 0
    expands = maps or own_settings
    assert os.environ[ALLOCATOR_NAMES[0]] == f"expandable_segments:{expands}"
    assert len(caplog.records) == (not expands)
