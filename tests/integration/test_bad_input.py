"""Tests of refused input: one clear line, no traceback, exit code 2, and nothing is written or started."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_flowrl.main import home_expanded, main


def refuse(arguments: Sequence[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command line `arguments` is answered, once it has been refused."""
    monkeypatch.setattr(sys, "argv", ["main", *arguments])
    code = main()
    captured = capfd.readouterr()
    assert code == 2, captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("async_flowrl: ")
    assert captured.out == ""
    return captured.err.rstrip("\n")


HERE = "runtime.backend=local"
"""For what is refused when the run is prepared, without the cluster that begins to start before (test_start.py)."""

ONE_LINE = {
    "unknown key": (["total_stepz=3"], ["total_stepz", "did you mean 'total_steps'"]),
    "unknown key, appended": (["+algorithm.clip_rato=1"], ["algorithm.clip_rato", "did you mean 'clip_range'"]),
    "unknown key, forced": (["++rollout.num_worker=1"], ["rollout.num_worker", "did you mean 'num_workers'"]),
    "unknown section": (["+trainr.threads=1"], ["trainr", "did you mean 'trainer'"]),
    "text for an integer": (["total_steps=many"], ["total_steps must be an integer", "'many'"]),
    "fraction for an integer": (["rollout.num_workers=1.5"], ["rollout.num_workers must be an integer", "1.5"]),
    "text for a number": (["algorithm.clip_range=wide"], ["algorithm.clip_range must be a number", "'wide'"]),
    "text for true or false": (["monitor.wandb=maybe"], ["monitor.wandb must be true or false", "'maybe'"]),
    "number for a list": (["lora.targets=3"], ["lora.targets must be a list of texts"]),
    "number for a pair": (["trainer.betas=3"], ["trainer.betas must be two numbers"]),
    "three for a pair": (["trainer.betas=[0.1,0.2,0.3]"], ["trainer.betas must be two numbers"]),
    "number for a section": (["rollout=3"], ["rollout must be a section with num_workers"]),
    "number for the rewards": (["reward.terms=3"], ["reward.terms must be a dictionary of rewards"]),
    "text for a weight": (["reward.terms.color.weight=much"], ["reward.terms.color.weight must be a number", "'much'"]),
    "part of a new reward": (["+reward.terms.ocr.weight=1"], ["no term 'ocr'", "'+reward.terms.ocr={weight: 1.0}'"]),
    "number for a new reward": (["+reward.terms.x=1"], ["no term 'x'", "'+reward.terms.x={weight: 1.0}'"]),
    "part of a missing reward": (["reward.terms.colour.weight=2"], ["the reward has no term 'colour'"]),
    "number for an option's name": (
        ["reward.terms.color.options.channel=0", "dry_run=true"],
        ["channel", "green", "got 0"],
    ),
    "number for options": (["algorithm.options=3"], ["algorithm.options must be a dictionary"]),
    "option of a missing reward": (["reward.terms.x.options.timeout=2"], ["the reward has no term 'x'"]),
    "a sweep without --multirun": (["seed=1,2"], ["seed must be an integer, got '1,2'", "--multirun"]),
    "an open list": (["lora.targets=[a"], ["lora.targets must be a list of texts", "got '[a'"]),
    "an option with other characters": (["algorithm.options.a=5% #"], ["algorithm.options.a", "'5% #'", "in quotes"]),
    "a group with other characters": (["reward=ocr #1"], ["reward must be one of", "'ocr #1'", "did you mean 'ocr'"]),
    "a reference without an end": (["name=${x"], ["name must be text, got '${x'"]),
    "a reference to nothing": (["name=${x}"], ["name: ", "'x' not found"]),
    "a value that is missing": (["name=???"], ["name has no value"]),
    "a field that is deleted": (["~algorithm.clip_range"], ["~algorithm.clip_range", "can be deleted"]),
    "unknown reward, added": (["+reward.terms={ocrr: {weight: 1}}"], ["'ocrr'", "did you mean 'ocr'"]),
    "no value": (["total_steps"], ["total_steps"]),
    "no key": (["=3"], ["=3", "key=value"]),
    "unknown reward": (["reward.terms.color.name=ocrr"], ["'ocrr'", "did you mean 'ocr'"]),
    "unknown reward group": (["reward=jpeg"], ["reward must be one of", "jpeg_compressibility"]),
    "unknown model group": (["model=qwen"], ["model must be one of", "did you mean 'qwen_image'"]),
    "unknown algorithm group": (["algorithm=flow_grop"], ["did you mean 'flow_grpo'"]),
    "unknown algorithm": (["algorithm.name=flow_grop", HERE], ["algorithm.name", "did you mean 'flow_grpo'"]),
    "unknown experiment": (["experiment=two_prompt"], ["did you mean 'two_prompts'"]),
    "unknown mode": (["mode=one_step"], ["mode must be one of", "did you mean 'one_step_off'"]),
    "unknown configuration": (["--config-name", "fully_asinc"], ["did you mean 'fully_async'"]),
    "model that does not exist": (["model.path=/nowhere/model"], ["/nowhere/model", "no such folder"]),
    "misspelt model": (["model.path=tinny"], ["did you mean 'tiny'"]),
    "misspelt hub model": (["model.path=Qwen/Qwen-Imag", HERE], ["did you mean 'Qwen/Qwen-Image'"]),
    "missing prompts": (
        ["data.train=prompts/ocr_trian.txt"],
        ["data.train=prompts/ocr_trian.txt does not", "ocr_train.txt?"],
    ),
    "nccl from the CPU": (
        ["checkpoint_engine.transport=nccl", "trainer.gpus_per_worker=0"],
        ["trainer.gpus_per_worker=0 leaves its workers on the CPU", "use gloo, object_store or auto"],
    ),
    "devices of one's own choice": (
        ["+rollout.environment={CUDA_VISIBLE_DEVICES: 1}"],
        ["rollout.environment cannot set CUDA_VISIBLE_DEVICES"],
    ),
    "group of one": (["group_size=1"], ["group_size must be at least 2, got 1"]),
    "negative staleness": (["max_staleness=-1"], ["max_staleness must be at least 0, got -1"]),
    "staleness of another mode": (["max_staleness=3"], ["mode=one_step_off means max_staleness=1, got 3"]),
    "no steps": (["total_steps=0"], ["total_steps must be at least 1, got 0"]),
    "no time": (["time_limit=0"], ["time_limit must be above 0, got 0"]),
    "no learning": (["trainer.learning_rate=-1"], ["trainer.learning_rate must be above 0"]),
    "no number": (["trainer.learning_rate=nan"], ["trainer.learning_rate must be a finite number, got nan"]),
    "a share above 1": (
        ["algorithm.timestep_fraction=2"],
        ["algorithm.timestep_fraction must be above 0 and at most 1"],
    ),
    "nothing that is trained": (["reward.terms.color.weight=0"], ["reward.terms", "color is 0"]),
    "no end of weights": (["reward.terms.color.weight=inf"], ["reward.terms.color.weight must be a finite number"]),
    "replicas of three among four ranks": (
        ["trainer.num_workers=4", "trainer.shard=hybrid", "trainer.shard_size=3", "dry_run=true"],
        ["trainer.shard_size=3 must divide trainer.num_workers=4", "2 or 4"],
    ),
    "micro-batches that do not divide": (["trainer.micro_batch_size=3", HERE], ["must divide", "2 or 4"]),
    "tickets that do not divide": (["ticket_size=5"], ["ticket_size=5 must divide group_size=16"]),
    "steps that do not divide": (
        ["trainer.timesteps_per_forward=2", HERE],
        ["must divide the number of trained steps=5"],
    ),
    "a placement that there is no more": (
        ["placement=colocated"],
        ["placement must be one of separate, shared, got 'colocated'"],
    ),
    "ranks in one process": (
        ["runtime.backend=local", "trainer.num_workers=2"],
        ["runtime.backend=local", "trainer.num_workers=2"],
    ),
    "threads bound like processes": (
        ["runtime.backend=local", "runtime.numa_binding=true"],
        ["runtime.numa_binding=true", "use runtime.backend=ray"],
    ),
    "a base that is whole and offloaded": (
        ["trainer.shard=none", "trainer.cpu_offload=true"],
        ["trainer.cpu_offload=true is FSDP2's", "set trainer.shard to full or auto, got none"],
    ),
    "GPUs that nothing uses": (
        ["rollout.gpus_per_worker=2"],
        ["rollout.gpus_per_worker=2", "computes on one GPU", "more rollout.num_workers"],
    ),
    "pairs that cannot meet": (["algorithm=dpo", "trainer.micro_batch_size=1", HERE], ["must be at least 2, got 1"]),
    "no evaluation steps": (["evaluate.num_inference_steps=0"], ["evaluate.num_inference_steps must be at least 1"]),
    "no average": (["trainer.ema_every=0"], ["trainer.ema_every must be at least 1, got 0"]),
    "growing weights": (["trainer.weight_decay=-1"], ["trainer.weight_decay must be at least 0, got -1"]),
    "a seed below 0": (["seed=-1"], ["seed must be at least 0 and at most 9223372036854775807, got -1"]),
    "a seed beyond 64 bits": ([f"evaluate.seed={10**20}"], ["evaluate.seed must be at least 0", f"got {10**20}"]),
    "layers that do not exist, in a dry run": (
        ["lora.targets=[to_qq]", "dry_run=true"],
        ["lora.targets: 'to_qq' names no linear layer", "did you mean attn.to_q?"],
    ),
    "a user that there is not": (["lora.path=~nobody_here", "dry_run=true"], ["~nobody_here does not exist"]),
    "no LoRA to start from": (["lora.path=/nowhere", HERE], ["lora.path /nowhere does not exist"]),
    "unknown resume": (["resume=yes"], ["resume=yes is neither never, auto nor force"]),
}


@pytest.mark.parametrize("case", ONE_LINE)
def test_one_line(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, told = ONE_LINE[case]
    out = tmp_path / "run"
    message = refuse([*arguments, f"output_dir={out}"], capfd, monkeypatch)
    assert len(message.splitlines()) == 1
    for part in told:
        assert part in message
    assert not out.exists()


OWN_MODULES = {
    "broken_on_import": 'raise OSError("libcudart is not\\nhere")',
    "own_algorithm": """
class Mine:
    def __init__(self, config, *, correction, strength=1.0):
        raise ZeroDivisionError("strength")
""",
}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm.name=broken_on_import:Mine", "cannot be imported: OSError: libcudart is not here"),
        ("model.family=broken_on_import:Mine", "cannot be imported: OSError: libcudart is not here"),
        ("algorithm.name=own_algorithm:Mine", "'own_algorithm:Mine' cannot be built: ZeroDivisionError: strength"),
        ("model.family=own_algorithm:Mine", "own_algorithm:Mine cannot be built: TypeError"),
    ],
)
def test_modules_of_ones_own_that_raise(
    override: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_modules(tmp_path, monkeypatch)
    message = refuse([override, "dry_run=true", f"output_dir={tmp_path / 'run'}"], capfd, monkeypatch)
    assert told in message
    assert len(message.splitlines()) == 1


def test_options_that_an_algorithm_of_ones_own_does_not_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_modules(tmp_path, monkeypatch)
    given = ["algorithm.name=own_algorithm:Mine", "+algorithm.options={strengthh: 2}", HERE]
    message = refuse([*given, f"output_dir={tmp_path / 'run'}"], capfd, monkeypatch)
    assert "algorithm.options: an option must be one of strength, got 'strengthh'; did you mean 'strength'?" in message


def own_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in OWN_MODULES.items():
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))


def test_nccl_is_asked_of_the_machine_not_of_the_controllers_torch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cluster of our own would have is what Ray counts here."""
    arguments = ["checkpoint_engine.transport=nccl", f"output_dir={tmp_path / 'run'}", "dry_run=true"]
    for seen_by_torch in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda seen=seen_by_torch: seen)
        monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 0}')
        message = refuse(arguments, capfd, monkeypatch)
        assert "transport nccl needs weights on a GPU, here they are on cpu" in message
        assert "use gloo, object_store or auto" in message
        monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        assert main() == 0
        capfd.readouterr()


def test_a_model_that_is_only_out_of_reach_is_not_called_misspelt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refuse(["model.path=Qwen/Qwen-Image", HERE, f"output_dir={tmp_path / 'run'}"], capfd, monkeypatch)
    assert "'Qwen/Qwen-Image' was not found" in message and "the hub cannot be reached" in message
    assert "did you mean" not in message


def test_unknown_key_and_wrong_type_in_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for line, told in (
        ("rollout: {num_worker: 2}", "num_worker"),
        ("rollout: {num_workers: two}", "rollout.num_workers must be an integer"),
    ):
        (folder / "mine.yaml").write_text(f"defaults: [one_step_off, _self_]\nname: mine\n{line}\n")
        arguments = ["--config-dir", str(folder), "--config-name", "mine", f"output_dir={tmp_path / 'run'}"]
        message = refuse(arguments, capfd, monkeypatch)
        assert told in message
        assert len(message.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_prompt_files(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = f"output_dir={tmp_path / 'run'}"
    empty, bare = tmp_path / "empty.txt", tmp_path / "bare.txt"
    empty.write_text("\n  \n")
    assert f"{empty} holds no prompts" in refuse([f"data.train={empty}", HERE, out], capfd, monkeypatch)
    bare.write_text('a sign that says "OPEN"\n\na sign that says nothing\n')
    message = refuse(["reward=ocr", f"data.train={bare}", HERE, out], capfd, monkeypatch)
    assert f"{bare}:3" in message
    assert "double quotes" in message
    assert not (tmp_path / "run").exists()


def test_output_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "something").write_text("of mine")
    message = refuse([f"output_dir={full}", HERE], capfd, monkeypatch)
    assert f"output_dir={full} is not empty" in message
    assert "resume=auto" in message
    assert [entry.name for entry in full.iterdir()] == ["something"]
    file.write_text("")
    for more in ([], ["dry_run=true"], ["hydra.verbose=false"]):
        assert "is a file" in refuse([f"output_dir={file}", HERE, *more], capfd, monkeypatch)
        assert "cannot be written" in refuse([f"output_dir={file}/run", HERE, *more], capfd, monkeypatch)


def test_more_workers_than_this_machine_holds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one refusal with a table: what was asked, pool by pool."""
    message = refuse(["rollout.num_workers=5000", f"output_dir={tmp_path / 'run'}"], capfd, monkeypatch)
    assert "5002 CPU" in message.splitlines()[0]
    assert [line.split()[:2] for line in message.splitlines()[1:]] == [
        ["pool", "workers"],
        ["trainer", "1"],
        ["rollout", "5000"],
        ["reward", "1"],
    ]
    assert not (tmp_path / "run").exists()


def test_what_only_the_model_knows_is_one_line_too_and_the_directory_stays_usable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter for layers that do not exist: found when the model is loaded, before a run begins."""
    common = ["runtime.backend=local", f"output_dir={tmp_path / 'run'}", "model.tiny.layers=1"]
    message = refuse(["lora.targets=[to_qq]", *common], capfd, monkeypatch)
    assert "'to_qq'" in message
    assert "did you mean attn.to_q?" in message
    assert len(message.splitlines()) == 1
    assert "is not empty" not in refuse(["lora.targets=[to_qq]", *common], capfd, monkeypatch)


def test_home_is_expanded_where_the_shell_leaves_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_expanded("output_dir=~/runs/a") == f"output_dir={tmp_path}/runs/a"
    assert home_expanded("~reward.terms.color") == "~reward.terms.color"
    assert home_expanded("--config-name") == "--config-name"
