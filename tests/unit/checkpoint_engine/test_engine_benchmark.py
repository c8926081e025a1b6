"""Tests of the transport benchmark's report and estimates; tests/integration/test_engine_benchmark.py measures."""

from benchmarks.delivery.measure import memory_needed
from benchmarks.delivery.report import report


def cell(transport: str, megabytes: float, fraction: float) -> dict[str, object]:
    keys = ("delivery_seconds", "primitive_seconds", "trainer_stall_memcpys", "worker_stall_memcpys")
    lag = {"loop_lag_p99_seconds": 0.01, "fraction_of_primitive": fraction}
    return {"transport": transport, "megabytes": megabytes, "receivers": 1, **dict.fromkeys(keys, 1.0), **lag}


def test_rows_that_miss_a_target_are_named_and_small_payloads_have_none() -> None:
    cells = [cell("gloo", 5.0, 0.1), cell("gloo", 50.0, 0.7), cell("gloo", 200.0, 0.9)]
    kills = [{"transport": "gloo", "megabytes": 50.0, "survivors": 2, "seconds": 7.0}]
    machine = {"cores": 2, "load": [1.0], "torch": "2"}
    text = report({"cells": cells, "after_kill": kills, "skipped": ["x"], "machine": machine, "repeats": 3})
    assert "fraction >= 0.8 at 50 MB and above: met by 1 of 2 rows, not by gloo 50 MB to 1\n" in text
    assert "trainer stall <= 1.5 copies at 50 MB and above: met by 2 of 2 rows\n" in text
    assert "within 5 s of a SIGKILL: 0 of 1" in text and "Not measured: x" in text


def test_what_does_not_fit_is_estimated_for_all_processes_together() -> None:
    assert 24.0 > memory_needed(850.0, 4) > memory_needed(850.0, 1) > 5.0
    assert memory_needed(5.0, 4) < 3.0
