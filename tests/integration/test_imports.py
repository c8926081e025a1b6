"""Test of the modules that a whole run imports: no tool, no test, no tracker, and no Ray in a run of threads."""

import subprocess
import sys
from pathlib import Path

from tests.integration.runs import LIMIT, LOCAL, ROOT

TOOLS = (
    "cli",
    "main",
    "doctor",
    "plan",
    "benchmark",
    "verify",
    "prove",
    "check_model",
    "evaluate",
    "export",
    "generate",
    "report",
)
RUN = """
import sys
from async_flowrl.config.compose import compose_config
from async_flowrl.run.job import run
code = run(compose_config("one_step_off", sys.argv[1:]))
print(*sorted(sys.modules))
sys.exit(code)
"""


def test_a_run_of_threads_imports_no_tool_no_test_no_ray_and_no_tracker(tmp_path: Path) -> None:
    given = (*LOCAL, "total_steps=2", "monitor.report=true", f"output_dir={tmp_path}")
    ran = subprocess.run([sys.executable, "-c", RUN, *given], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "report.html").exists(), "who starts a run brings the tool that writes its report"
    imported = {name.partition(".")[::2] for name in ran.stdout.splitlines()[-1].split()}
    assert ("async_flowrl", "loop") in imported
    packages = {package for package, _ in imported}
    assert "torch" in packages
    assert not packages & {"tests", "ray", "wandb", "tensorboard", "matplotlib", "rapidocr", "pandas", "datasets"}
    assert not {rest.partition(".")[0] for package, rest in imported if package == "async_flowrl"} & set(TOOLS)
