"""Tests of check-model against diffusers' pipelines of all families, and against wrong families of a user."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext as kontext_rules
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_rules

from async_flowrl.cli.check_model import CAUSES, main
from async_flowrl.config.compose import compose_config
from async_flowrl.policies import checked
from async_flowrl.run.job import run
from tests.integration.runs import LOCAL
from tests.support.families import EDITING, EXPERTS, NAMES, WHOLE_TEXTS

SHORT = ["--max-sequence-length", "24", "--num-inference-steps", "4"]
SD3 = ["tiny", "--tiny-family", "sd3", *SHORT]
HEAD = """
from async_flowrl.policies.sd3 import SD3Family, SD3Policy


class Own(SD3Policy):
    pass
{body}

class Family(SD3Family):
    policy = Own
"""
NOTHING = ""
Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps of this session alone, beside the tiny models of all tests."""
    monkeypatch.setattr(checked, "cache_dir", lambda: tmp_path_factory.getbasetemp())


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a family of one's own with the lines given; returns its name. Each test has a module of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"own_{tmp_path.name}".replace("-", "_")
    monkeypatch.delitem(sys.modules, module, raising=False)

    def write(body: str) -> str:
        indented = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / f"{module}.py").write_text(HEAD.format(body=indented))
        return f"{module}:Family"

    return write


def verdicts(printed: str) -> dict[str, str]:
    """yes or no by step, as the table has them."""
    cells = [re.split(r"\s{2,}", line) for line in printed.splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 4 and row[0] != "step"}


QUICK = ("flux_kontext", "wan_image", "flux")
"""Families that are checked in float32, beside the tiny models of EXPERTS, which `make test` checks."""
LATER = [name for name in (*NAMES, *EDITING) if name not in QUICK]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in EXPERTS),
        *(pytest.param(name, "float32", marks=pytest.mark.extended) for name in QUICK),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in LATER),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in ("flux", "wan_image")),
    ],
)
def test_a_shipped_family_is_its_stock_pipeline(
    name: str, dtype: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit_rules, "VAE_IMAGE_SIZE", 256**2)  # Of an image to edit, in place of 1024²: a 16th.
    monkeypatch.setattr(kontext_rules, "PREFERRED_KONTEXT_RESOLUTIONS", [(256, 256), (320, 192)])
    padded = [] if name in WHOLE_TEXTS else SHORT
    padded = ["--resolution", "5x32x48"] if name == "wan_image" else padded
    assert main(["tiny", "--tiny-family", EXPERTS.get(name, name), "--dtype", dtype, *padded]) == 0
    assert verdicts(capsys.readouterr().out) == dict.fromkeys(CAUSES, "yes")


ONE_LEVEL = """
def velocity(self, latents, sigma, *rest):
    return super().velocity(latents, sigma[:1].expand(len(sigma)), *rest)
"""
BROKEN = (
    ("prompt embeddings", "def _encode_one(self, text): return super()._encode_one(text + '!')", "pooled_projections"),
    ("schedule", "def sigmas(self, *given): return super().sigmas(*given) ** 1.1", "at number 0: _set_schedule"),
    ("velocity", "def _network(self, *given): return -super()._network(*given)", "at number 0: _network or _guide"),
    ("decoded images", "def _unpacked(self, pipeline, x, size): return x.flip(-1)", "_decoded or _unpacked"),
    ("LoRA round trip", "lora_targets = ('norm1.linear_of_another',)", "names no linear layer of the model"),
    ("noise levels in one batch", ONE_LEVEL, "rows at different noise levels"),
    ("stock call", "def guidance_arguments(self, sampling): return {'true_cfg_scale': 4.0}", "are guidance_arguments"),
)


@pytest.mark.parametrize(("step", "body", "said"), BROKEN)
def test_a_wrong_family_is_caught_at_the_step_that_differs(
    family: Write, step: str, body: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SD3, "--family", family(body)]) == 1
    printed = capsys.readouterr().out
    assert next(name for name, verdict in verdicts(printed).items() if verdict == "no") == step
    last = printed.splitlines()[-1]
    assert last.startswith(f"{step} is the first step that differs: ") and said in last


@pytest.mark.extended
def test_a_run_warns_of_a_family_until_it_is_checked_as_it_is(
    family: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = family(NOTHING)
    model = [
        "model.tiny.family=sd3",
        "model.tiny.layers=2",
        f"model.family={name}",
        "model.max_sequence_length=24",
        f"output_dir={tmp_path}/run",
    ]

    def said(*overrides: str) -> str:
        assert run(compose_config("one_step_off", [*LOCAL, *model, "total_steps=1", *overrides])) == 0
        both = capsys.readouterr()
        return both.out + both.err

    warning = f"WARNING: model.family={name} was never compared with its stock pipeline"
    before = said("dry_run=true")
    assert warning in before
    command = next(line for line in before.splitlines() if line.startswith(warning)).partition(
        "async-flowrl check-model "
    )
    assert warning in said()
    assert main([*command[2].split(), *SHORT]) == 0
    capsys.readouterr()
    assert "WARNING" not in said("dry_run=true", f"output_dir={tmp_path}/other")
    by_file = tmp_path / name.replace(":", ".py:")
    assert "WARNING" not in said("dry_run=true", f"output_dir={tmp_path}/other", f"model.family={by_file}")
    family("lora_exclude = None")
    assert warning in said("dry_run=true", f"output_dir={tmp_path}/other")
