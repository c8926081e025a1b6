"""Tests of a real run whose held-out score falls: it warns, stops in order, keeps the best version, and can go on."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from async_flowrl.config import exit_codes
from async_flowrl.report.document import document
from async_flowrl.training.checkpoint import read_checkpoint
from tests.integration.runs import WHOLE, Run, train

PLACE = "tests.integration"
PLANTED = (
    *WHOLE,
    "group_size=8",
    "trainer.micro_batch_size=8",
    "trainer.learning_rate=0.02",
    "evaluate.every=6",
    "evaluate.before_training=true",
    "evaluate.images_per_prompt=3",
    "evaluate.max_prompts=6",
    "evaluate.baseline=true",
    "evaluate.baseline_steps=3",
    "save.keep=1",
    f'reward.terms={{bright: {{name: "{PLACE}.brightness:brightness"}}}}',
    f'evaluate.reward.terms={{dark: {{name: "{PLACE}.brightness:darkness"}}}}',
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "six.txt"
    file.write_text("".join(f"a {word} square\n" for word in ("red", "green", "blue", "grey", "pale", "dark")))
    return f"data.train={file}"


@pytest.mark.extended
def test_a_run_with_held_out_terms_leaves_records_baseline_and_best(prompts: str, tmp_path: Path) -> None:
    """The held-out term that never answers costs exit code 3 and nothing else."""
    terms = f'+evaluate.reward.terms.silent={{name: "{PLACE}.brightness:silent"}}'
    small = ["model.tiny.layers=1", "group_size=4", "trainer.micro_batch_size=4"]
    given = [*PLANTED, *small, prompts, terms, "total_steps=2", "save.best=dark"]
    given += ["reward.backoff=0", "reward.retries=1"]
    run = train(tmp_path / "run", "one_step_off", *given, code=exit_codes.INCOMPLETE)
    lines = [json.loads(line) for line in (run.root / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["version"], line["baseline"], line["steps"]) for line in lines] == [
        (0, True, 3),
        (0, False, 6),
        (2, False, 6),
    ]
    assert len(run.summary["failed"]) == 3 and all("held-out silent" in each for each in run.summary["failed"])
    assert "the judge is out" in run.summary["failed"][0]
    last = run.summary["evaluations"]["last"]["curves"]
    assert {name: curve["kind"] for name, curve in last.items()} == {
        "reward": "trained",
        "bright": "trained",
        "dark": "held_out",
        "diversity": "diversity",
    }
    assert last["dark"]["change"] == pytest.approx(-last["bright"]["change"]), "the same images, seen twice"
    assert run.metrics[0].keys() >= {"evaluation_baseline/reward/mean", "evaluation_before/held_out/dark/stderr"}
    check_best(run)
    page = document([run.root])
    (shown,) = page["runs"]
    evaluations = shown["evaluations"]
    assert [column["kind"] for column in evaluations["columns"]] == ["trained", "held out", "diversity"]
    assert [(row["baseline"], row["steps"]) for row in evaluations["rows"]] == [(True, 3), (False, 6), (False, 6)]
    assert evaluations["rows"][-1]["cells"]["dark"]["change"] == pytest.approx(last["dark"]["change"], rel=1e-4)
    assert {"held_out", "diversity"} <= {panel["id"] for panel in page["panels"]}
    assert [e["baseline"] for e in shown["pictures"]["evaluations"]] == [True, False, False]
    assert len([each for each in shown["warnings"] if "held-out silent" in each["text"]]) == 3


def check_best(run: Run) -> None:
    """lora_best/ holds exactly the weights that the best version was evaluated with."""
    best = run.summary["evaluations"]["best"]
    tensors = read_checkpoint(run.root / "checkpoints" / f"step_{best['version']}").tensors["retained"]
    exported = load_file(run.root / "lora_best" / "pytorch_lora_weights.safetensors")
    assert exported, "an adapter without tensors"
    for name, tensor in exported.items():
        assert tensor.equal(tensors[f"{best['version']}/{name.removeprefix('transformer.')}"].float())


@pytest.mark.slow
def test_a_planted_hack_stops_the_run_in_order_and_it_goes_on_when_asked(prompts: str, tmp_path: Path) -> None:
    given = [*PLANTED, prompts, "total_steps=60"]
    run = train(tmp_path / "run", "one_step_off", *given, "evaluate.on_hacking=stop", code=exit_codes.HACKING)
    told = (run.root / "logs" / "controller.log").read_text()
    assert told.count("reward hacking?") == 1 and "the held-out score dark" in told
    stopped = run.summary["steps"]
    assert stopped < 60 and run.summary["hacking"]["alarms"] and (run.root / "lora").is_dir()
    assert [e["curve"] for e in run.events if e["event"] == "hacking"]
    assert run.summary["evaluations"]["best"]["curve"] == "dark"
    check_best(run)
    total = f"total_steps={stopped + 2}"
    again = train(tmp_path / "run", "one_step_off", *given, total, "resume=auto", "evaluate.on_hacking=warn")
    assert Run(again.root).summary["steps"] == stopped + 2
