"""Tests that run the commands and the Python code of docs/export.md and docs/evaluate_command.md."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from async_flowrl import __main__ as verbs
from async_flowrl.config.schema import Config, LoraConfig, ModelConfig, RewardTerm
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.registry import resolve_model
from async_flowrl.training.checkpoint import Checkpoint, write_checkpoint
from tests.support.tiny import adapted_policy, save_lora

DOCS = Path(__file__).parents[2] / "docs"
LORA = LoraConfig(rank=4, alpha=8.0)
COMMAND = re.compile(r"^    async-flowrl (export|evaluate|generate) (.*)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for RUN, OUT, FOLDER and PROMPTS: a run with one image per prompt."""
    root = tmp_path_factory.mktemp("docs")
    policy = adapted_policy(config=LORA)
    run = root / "run"
    weights = {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}
    trainer = {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}
    write_checkpoint(run / "checkpoints", 2, Checkpoint({"weights": weights}, trainer, {}), keep=1)
    save_lora(run / "lora", policy.transformer, alpha=LORA.alpha)
    config = Config(lora=LORA)
    config.reward.terms = {"color": RewardTerm()}
    config.evaluate.images_per_prompt, config.evaluate.num_inference_steps = 1, 2
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    prompts = root / "mine.txt"
    prompts.write_text("red\n")
    named = {"RUN": run, "OUT": root / "out", "FOLDER": root / "found", "PROMPTS": prompts}
    return {name: str(path) for name, path in named.items()}


def filled(text: str, places: dict[str, str], base: str) -> str:
    return re.sub(r"\b(RUN|OUT|FOLDER|PROMPTS|BASE)\b", lambda match: (places | {"BASE": base})[match[1]], text)


def exit_code() -> int:
    """Exit code of the verb in `sys.argv`."""
    try:
        return verbs.main()
    except SystemExit as end:
        return int(end.code or 0)


def test_they_do_what_they_say(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, one on what the other left; each page's Python after its commands."""
    out, folder = Path(places["OUT"]), resolve_model(ModelConfig()).path
    for page, least in (("export.md", 6), ("evaluate_command.md", 3)):
        text = (DOCS / page).read_text(encoding="utf-8")
        commands = COMMAND.findall(text)
        assert len(commands) >= least
        for verb, arguments in commands:
            if "--merged" in arguments and (out / "merged").exists():
                continue
            words = shlex.split(filled(arguments, places, "tiny"))
            monkeypatch.setattr("sys.argv", ["async-flowrl", verb, *words])
            assert exit_code() == 0, arguments
        for block in PYTHON.findall(text):
            held: dict[str, object] = {}
            exec(compile(filled(block.replace("(BASE)", '("BASE")'), places, folder), page, "exec"), held)
            transformer = held["pipe"].transformer  # type: ignore[attr-defined]
            assert isinstance(transformer, torch.nn.Module)
    assert {"README.md", "peft", "comfyui.safetensors", "kohya.safetensors", "merged", "again", "grid.png"} <= {
        entry.name for entry in out.iterdir()
    }
    again = lora_file.read(out / "again").tensors
    assert all(torch.equal(t, again[n]) for n, t in lora_file.read(out).tensors.items())
