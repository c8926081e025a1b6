"""Tests of the modules that commands import; each of those listed costs a second or more."""

import json
import subprocess
import sys

from tests.integration.runs import LIMIT, ROOT

HEAVY = ("torch", "diffusers", "transformers", "peft", "ray", "scipy", "matplotlib", "wandb", "tensorboard", "rapidocr")
ANSWERS = """
import contextlib, importlib, io, json, sys
for name, (module, arguments) in json.loads(sys.argv[1]).items():
    before, sys.argv = set(sys.modules), ["command", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = importlib.import_module(f"async_flowrl.{module}").main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([name, [code, said.getvalue(), sorted(set(sys.modules) - before)]]))
"""
NO_COMPUTING = {
    "no verb": ("__main__", []),
    "version": ("__main__", ["--version"]),
    "unknown verb": ("__main__", ["nonsense"]),
    "help of the export": ("cli.export", ["--help"]),
    "arguments of the export": ("cli.export", ["only_one"]),
    "help of the planner": ("cli.plan", ["--help"]),
    "arguments of the planner": ("cli.plan", ["--devices", "many"]),
    "unknown key": ("main", ["total_stepz=3"]),
    "unknown group": ("main", ["reward=ocrr"]),
    "wrong type": ("main", ["seed=abc"]),
    "unknown mode": ("main", ["mode=one_step"]),
    "out of bounds": ("main", ["total_steps=0"]),
    "unknown reward": ("main", ["reward.terms.color.name=ocrr"]),
    "missing prompts": ("main", ["data.train=/nowhere/prompts.txt"]),
    "missing model": ("main", ["model.path=/nowhere/model"]),
    "used directory": ("main", [f"output_dir={ROOT}"]),
}
"""What can be answered without a tensor."""
ANSWERED = {name for name in NO_COMPUTING if "help" in name} | {"no verb", "version"}


def test_an_answer_that_needs_no_tensor_loads_no_torch() -> None:
    """All are asked in one process; a module counts for the case that is the first to load it."""
    command = [sys.executable, "-c", ANSWERS, json.dumps(NO_COMPUTING)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    answers = dict(map(json.loads, done.stdout.splitlines()))
    assert answers.keys() == NO_COMPUTING.keys()
    for case, (code, said, modules) in answers.items():
        assert code == (0 if case in ANSWERED else 2), said
        assert "Traceback" not in said
        assert not {name.partition(".")[0] for name in modules} & set(HEAVY), case
