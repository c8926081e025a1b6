"""Test of NUMA binding, with a made-up topology in a folder, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, sys, threading
from pathlib import Path
from separation.node import bind_beside

done, seen = threading.Event(), []
before = threading.Thread(target=lambda: (done.wait(), seen.append(os.sched_getaffinity(0))))
before.start()
print(bind_beside(Path(sys.argv[1])))
done.set(); before.join()
print(sorted(os.sched_getaffinity(0)), sorted(seen[0]))
"""


def gpu(folder: Path, local: str, node: str = "1") -> Path:
    (folder / "local_cpulist").write_text(local + "\n")
    (folder / "numa_node").write_text(node + "\n")
    return folder


def test_a_process_and_the_threads_it_has_move_to_the_cpus_beside_the_gpu(tmp_path: Path) -> None:
    import os

    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one CPU")
    last = allowed[-1]
    command = [sys.executable, "-c", CHILD, str(gpu(tmp_path, f"{last},4000-4003"))]
    said, where = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == f"bound to 1 of {len(allowed)} CPUs, those of NUMA node 1"
    assert where == f"[{last}] [{last}]", "a thread that was there before is bound, too"
