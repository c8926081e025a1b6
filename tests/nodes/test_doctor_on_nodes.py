"""Tests of the doctor on several nodes: it names one with other code, or without a package or seat."""

import shutil
import sys
from pathlib import Path

import pytest

import checkpoint_engine
from tests.nodes.pretended_nodes import Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
SECONDS = 600.0


def doctor(nodes: Nodes, *words: str) -> tuple[int, str]:
    """Runs the doctor on the first node and returns its exit code and its output."""
    command = [sys.executable, "-m", "async_flowrl", "doctor", f"runtime.address={nodes.ray_address}", *words]
    process = nodes.head.start(*command)
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def test_other_code_is_named(allowed: None, tmp_path: Path) -> None:
    installed, edited = Path(checkpoint_engine.__file__).parent, tmp_path / "edited"
    shutil.copytree(installed, edited)
    (edited / "__init__.py").write_text((edited / "__init__.py").read_text() + "# edited here\n")
    with Nodes(tmp_path / "nodes", [{"trainer": 1, "rollout": 1}]) as nodes:
        nodes.head.start_ray()
        other = nodes.add({})
        other.run("mount", "--bind", str(edited), str(installed))
        other.start_ray(nodes.head)
        code, said = doctor(nodes, "--nodes", "2", f"output_dir={tmp_path / 'run'}")
        lines = {line.split(":")[0].split(maxsplit=1)[-1]: line for line in said.splitlines() if ": " in line}
        assert code == 1 and "this configuration cannot start here" in said, said
        assert f"{other.address} " in lines["code"] and "has another checkpoint_engine" in lines["code"], said
        assert lines["Ray"].strip().startswith("ok") and lines["broadcast"].strip().startswith("ok"), said
