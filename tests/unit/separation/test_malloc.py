"""Tests of the memory that malloc keeps: page faults and resident memory of torch tensors, each in its own process."""

import os
import resource
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from separation.malloc import TUNABLES, VARIABLES, keep_freed_memory, set_by_environment
from tests.support.forked import CONTEXT

GLIBC = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is not glibc")
MIB = 2**20


def activations(count: int, mib: int) -> list[torch.Tensor]:
    return [torch.ones(mib * MIB // 4) for _ in range(count)]


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        activations(40, 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


def kept(count: int, mib: int) -> float:
    before = resident()
    activations(count, mib)
    return (resident() - before) / MIB


def measure(found: dict[str, float]) -> None:
    found["before"] = faults()
    found["set"] = keep_freed_memory()
    faults()
    found["after"] = faults()
    found["kept"] = kept(12, 40)


def passes(said: Connection, environment: dict[str, str]) -> None:
    """Runs in a process of its own: sends what a thread of it has measured."""
    found: dict[str, float] = {}
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    worker = threading.Thread(target=measure, args=(found,))
    worker.start()
    worker.join()
    said.send(found)


def measured(**environment: str) -> dict[str, float]:
    """Page faults of ten passes before and after the setting, and MiB kept of 480 in large blocks."""
    plain = {name: value for name, value in os.environ.items() if not set_by_environment({name: value})}
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=passes, args=(theirs, plain | environment), daemon=True)
    process.start()
    assert ours.poll(240), "it has not measured"
    found = dict(ours.recv())
    process.join()
    return found


@pytest.mark.serial("ranks")
@GLIBC
def test_the_pages_of_activations_are_mapped_once() -> None:
    """40 MiB are 10,240 pages. Without the setting, thousands of them are mapped again in each of the ten passes."""
    found = measured()
    assert found["set"]
    assert found["before"] > 10_000
    assert found["after"] < found["before"] / 20
    assert found["kept"] < 32, "blocks above the threshold go back"


@pytest.mark.serial("ranks")
@GLIBC
def test_what_the_environment_sets_stays() -> None:
    found = measured(MALLOC_TRIM_THRESHOLD_="131072")
    assert not found["set"]
    assert found["after"] > found["before"] / 2


@pytest.mark.parametrize(
    "given",
    [*({name: "1"} for name in VARIABLES), {TUNABLES: "glibc.cpu.x=1:glibc.malloc.top_pad=0"}],
    ids=lambda given: next(iter(given)),
)
def test_parameters_of_malloc_in_the_environment(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, TUNABLES):
        monkeypatch.delenv(name, raising=False)
    assert not set_by_environment({"MALLOC_ARENA_MAX": "2", TUNABLES: "glibc.cpu.x=1"})
    assert set_by_environment(given)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, TUNABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "confstr_names", {"CS_PATH": 0})
    assert not keep_freed_memory()
