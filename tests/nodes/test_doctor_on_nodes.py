"""Test of the doctor on several nodes: it waits for them, and names one with other code."""

import shutil
import sys
from pathlib import Path

import pytest

import checkpoint_engine
from tests.nodes.pretended_nodes import Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]
SECONDS = 600.0


def doctor(nodes: Nodes, *words: str) -> tuple[int, str]:
    """Runs the doctor on the first node and returns its exit code and its output."""
    command = [sys.executable, "-m", "async_flowrl", "doctor", f"runtime.address={nodes.ray_address}", *words]
    process = nodes.head.start(*command, RAY_AUTH_MODE="token")
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def test_other_code_is_named(allowed: None, tmp_path: Path) -> None:
    installed, edited = Path(checkpoint_engine.__file__).parent, tmp_path / "edited"
    shutil.copytree(installed, edited)
    (edited / "__init__.py").write_text((edited / "__init__.py").read_text() + "# edited here\n")
    with Nodes(tmp_path / "nodes", [{"trainer": 1}]) as nodes:
        nodes.head.start_ray()
        other = nodes.add({"rollout": 1})
        other.run("mount", "--bind", str(edited), str(installed))
        other.start_ray(nodes.head)
        code, said = doctor(nodes, "--nodes", "2", f"output_dir={tmp_path / 'run'}")
        assert code == 1 and "ok       nodes: 2 at " in said, said
        assert f"failed   start: node {other.address} has another version of checkpoint_engine" in said, said
