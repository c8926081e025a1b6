"""Tests of refused input: one clear line, no traceback, exit code 2, and nothing is written or started."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from async_flowrl.__main__ import main as verb
from async_flowrl.main import home_expanded, main

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """What a command line is answered, once it has been refused."""

    def answer(arguments: Sequence[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        code = main()
        captured = capsys.readouterr()
        assert code == 2, captured.err
        assert "Traceback" not in captured.err
        assert captured.err.startswith("async_flowrl: ")
        assert captured.out == ""
        return captured.err.rstrip("\n")

    return answer


HERE = "runtime.backend=local"
"""For what is refused when the run is prepared, without the cluster that begins to start before (test_start.py)."""
SHARED, SERVE = "placement=shared", "{command: 'a {port}'}"
PIN = "options: {revision: 0123456789012345678901234567890123456789}"
WHOLE = "tune=full"

SHARED_BASE = ("trainer.num_workers=2", "trainer.shard=full", "dry_run=true")
HTTP_TERM = ("reward.terms={far: {name: http, options: {url: 'http://127.0.0.1:9'}}}", "group_size=4", "dry_run=true")
REFUSED: list[tuple[list[str], str]] = [
    # What is typed wrong: the key, and the nearest one where there is one.
    (["total_stepz=3"], "total_stepz total_steps"),
    (["+algorithm.clip_rato=1"], "algorithm.clip_rato clip_range"),
    (["learning_rte=1"], "trainer.learning_rate"),
    (["seed=1,2"], "seed --multirun"),
    (["lora.targets=[a"], "lora.targets"),
    (["algorithm.options.a=5% #"], "algorithm.options.a"),
    (["reward=ocr #1"], "reward 'ocr'"),
    (["name=${x"], "name"),
    (["name=${x}"], "name"),
    (["name=???"], "name ???"),
    (["~algorithm.clip_range"], "~algorithm.clip_range"),
    (["total_steps"], "total_steps"),
    (["=3"], "=3 key=value"),
    (["reward=jpeg"], "reward jpeg_compressibility"),
    (["model=qwen"], "model 'qwen_image'"),
    (["model=Qwen/Qwen-Image"], "model 'qwen_image' model.path"),
    (["reward=./mine.py:f"], "reward reward.terms"),
    (["algorithm=grpo"], "mean 'flow_grpo'"),
    (["algorithm.name=flow_grop", HERE], "algorithm.name 'flow_grpo'"),
    (["--config-name", "fully_asinc"], "'fully_async'"),
    (["model.path=/nowhere/model"], "/nowhere/model"),
    (["model.path=tinny"], "'tiny'"),
    (["model.path=Qwen/Qwen-Imag", HERE], "'Qwen/Qwen-Image'"),
    (["data.train=prompts/ocr_trian.txt"], "data.train ocr_train.txt"),
    (["lora.targets=[to_qq]", "dry_run=true"], "lora.targets attn.to_q"),
    (["lora.path=~nobody_here", "dry_run=true"], "~nobody_here"),
    (["lora.path=/nowhere", HERE], "lora.path"),
    (["resume=yes"], "resume"),
    # Values of another type.
    (["rollout.num_workers=1.5"], "rollout.num_workers"),
    (["lora.targets=3"], "lora.targets"),
    (["monitor.wandb=maybe"], "monitor.wandb"),
    (["trainer.betas=[0.1,0.2,0.3]"], "trainer.betas"),
    # Values out of bounds, besides those of one key: tests/unit/config/test_schema.py.
    (["rollout.true_cfg_scale_2=3"], "rollout.true_cfg_scale_2 rollout.true_cfg_scale"),
    (["rollout.true_cfg_scale=4", "rollout.true_cfg_scale_2=3", "dry_run=true"], "true_cfg_scale_2 Qwen-Image"),
    (["model=tiny_wan22", *SHARED_BASE], "algorithm.window_per=group window_per=step trainer.shard=none"),
    (["model=tiny_wan21", "rollout.frames=65", *HTTP_TERM], "reward.terms.far 1560 max_images=256"),
    # Values that do not go together.
    (["max_staleness=3"], "mode=one_step_off max_staleness"),
    (["trainer.micro_batch_size=3", HERE], "trainer.micro_batch_size"),
    (["ticket_size=5"], "ticket_size group_size"),
    (["trainer.timesteps_per_forward=2", HERE], "trainer.timesteps_per_forward"),
    (["algorithm=dpo", "trainer.micro_batch_size=1", HERE], "trainer.micro_batch_size"),
    (["algorithm.beta=0.04", HERE], "algorithm.beta flow_grpo algorithm.kl_coef"),
    (["algorithm=flow_cps", "rollout.num_inference_steps=3", HERE], "sde_window_size"),
    (["trainer.num_workers=4", "trainer.shard=hybrid", "trainer.shard_size=3", "dry_run=true"], "trainer.shard_size"),
    (["trainer.num_workers=2", "trainer.micro_batch_size=4", "trainer.gpus_per_worker=0.5"], "gpus_per_worker=0.5"),
    ([HERE, "trainer.num_workers=2"], "runtime.backend=local trainer.num_workers"),
    ([HERE, "runtime.numa_binding=true"], "runtime.numa_binding"),
    ([HERE, "rollout.workers_per_node=1"], "runtime.backend=local"),
    ([HERE, "+reward.environment={API_KEY: x}"], "API_KEY runtime.backend=local"),
    (["trainer.num_workers=4", "trainer.workers_per_node=2"], "trainer.workers_per_node runtime.address"),
    (["runtime.address=auto", "trainer.num_workers=4", "trainer.workers_per_node=3"], "trainer.workers_per_node"),
    (["trainer.shard=none", "trainer.cpu_offload=true"], "trainer.cpu_offload trainer.shard"),
    (["rollout.gpus_per_worker=2"], "rollout.gpus_per_worker"),
    (["+rollout.environment={CUDA_VISIBLE_DEVICES: 1}"], "rollout.environment CUDA_VISIBLE_DEVICES"),
    (["+rollout.environment={LD_PRELOAD: a.so}"], "LD_PRELOAD"),
    ([WHOLE, "trainer.shard=hybrid"], "trainer.shard=hybrid"),
    ([WHOLE, "trainer.cpu_offload=true"], "trainer.cpu_offload"),
    ([WHOLE, "lora.path=x"], "lora.path"),
    ([WHOLE, "rollout.engine=vllm_omni"], "rollout.engine"),
    (["full.freeze=[x]"], "tune=full"),
    (["rollout.max_workers=4"], "runtime.address"),
    (["runtime.address=auto", "rollout.min_workers=3"], "rollout.max_workers"),
    (["rollout.tickets_per_batch=99", HERE], "rollout.tickets_per_batch"),
    (["rollout.resolution=40", HERE], "resolution 16"),
    (["rollout.resolutions=[32,[50,90]]", HERE], "rollout.resolutions"),
    (["rollout.resolutions=[32,wide]"], "rollout.resolutions"),
    ([SHARED, "trainer.num_workers=2"], "trainer.num_workers rollout.num_workers"),
    ([SHARED, "trainer.gpus_per_worker=0.5"], "trainer.gpus_per_worker"),
    ([SHARED, "trainer.shard=full"], "trainer.shard"),
    ([SHARED, "checkpoint_engine.transport=gloo"], "checkpoint_engine.transport"),
    ([SHARED, "rollout.max_workers=4"], "rollout.max_workers"),
    ([SHARED, "rollout.engine=vllm_omni"], "placement=separate"),
    ([SHARED, "+trainer.environment={A: 1}", "+rollout.environment={A: 2}"], "trainer.environment rollout.environment"),
    # Rewards.
    (["reward.terms={}", HERE], "reward=ocr"),
    (["reward.terms.color.weight=0"], "reward.terms color"),
    (["+reward.terms.ocr.weight=1"], "+reward.terms.ocr="),
    (["+reward.terms.x=1"], "+reward.terms.x="),
    (["reward.terms.colour.weight=2"], "'colour'"),
    (["reward.terms={'ocr': {}}"], "quotes"),
    (["reward.terms.color.name=ocrr"], "'ocrr' 'ocr'"),
    (["reward.terms.color.options.channel=0", "dry_run=true"], "channel green"),
    (["+reward.terms.x={name: http}", HERE], "x options.url"),
    (["+reward.terms.x={name: http, options: {url: 'ftp://x'}}", HERE], "url"),
    (["+reward.terms.x={name: http, options: {url: 'http://me:secret@x'}}", HERE], "token_env"),
    (["+reward.terms.x={name: http, options: {url: 'http://x', timeout: 300}}", HERE], "deadline timeout"),
    ([f"+reward.terms.x={{name: color, serve: {SERVE}}}", HERE], "x.serve"),
    (["+reward.terms.x={serve: {command: a}}", HERE], "command {port}"),
    (["+reward.terms.x={serve: {command: 'a {port}', port: 65535, replicas: 2}}", HERE], "serve.port replicas 65535"),
    (["+reward.terms.x={serve: {command: 'nosuch {port}'}}", HERE], "reward.terms.x.serve.command 'nosuch'"),
    (["+reward.terms.x={name: vlm_judge, options: {model: a}}", HERE], "options.base_url"),
    (["+reward.terms.x={name: vlm_judge, options: {model: a, base_url: 'http://h', range: [10, 1]}}", HERE], "range"),
    (["+reward.terms.x={name: pickscore, options: {batch_size: 0}}", HERE], "reward.terms.x batch_size"),
    ([f"+reward.terms.x={{name: pickscore, {PIN}}}", HERE], "processor_revision"),
    (["+reward.terms.x={name: pickscore, options: {model: /nowhere}}", HERE], "model '/nowhere'"),
    (["+reward.terms.x={name: 'no_such_module:f'}", HERE], "no_such_module:f"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_bad_input_ends_with_exit_code_2_and_a_line_that_names_the_key(
    arguments: list[str], named: str, tmp_path: Path, refused: Refused
) -> None:
    out = tmp_path / "run"
    message = refused([*arguments, f"output_dir={out}"])
    assert len(message.splitlines()) == 1
    for part in named.split(" "):
        assert part in message
    assert not out.exists()


OWN_MODULES = {
    "broken_on_import": 'raise OSError("libcudart is not\\nhere")',
    "own_algorithm": """
class Mine:
    def __init__(self, config, *, correction, strength=1.0):
        raise ZeroDivisionError("strength")


def of_trl(prompts, completions, **kwargs):
    return [0.0 for _ in completions]
""",
}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.name=broken_on_import:Mine", "dry_run=true"], "OSError"),
        (["model.family=broken_on_import:Mine", "dry_run=true"], "OSError"),
        (["algorithm.name=own_algorithm:Mine", "dry_run=true"], "own_algorithm:Mine"),
        (["model.family=own_algorithm:Mine", "dry_run=true"], "own_algorithm:Mine"),
        (["algorithm.name=own_algorithm:Mine", "+algorithm.options={strengthh: 2}", HERE], "'strength'"),
        (["+reward.terms.x={name: 'own_algorithm.py:Mines'}", HERE], "'Mine'"),
        (["+reward.terms.x={name: 'own_algorithm:of_trl'}", HERE], "reward.terms.x: own_algorithm:of_trl"),
    ],
)
def test_modules_of_ones_own_that_raise(
    overrides: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for name, text in OWN_MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    message = refused([*overrides, f"output_dir={tmp_path / 'run'}"])
    assert named in message
    assert len(message.splitlines()) == 1


def test_nccl_is_asked_of_the_machine_not_of_the_controllers_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """What a cluster of our own would have is what Ray counts here."""
    arguments = ["checkpoint_engine.transport=nccl", f"output_dir={tmp_path / 'run'}", "dry_run=true"]
    for seen_by_torch in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda seen=seen_by_torch: seen)
        monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 0}')
        message = refused(arguments)
        assert "transport nccl needs weights on a GPU, here they are on cpu" in message
        assert "use gloo, object_store or auto" in message
        monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2}')
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        assert main() == 0
        capsys.readouterr()


@pytest.mark.extended
def test_a_model_that_is_only_out_of_reach_is_not_called_misspelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused(["model.path=Qwen/Qwen-Image", HERE, f"output_dir={tmp_path / 'run'}"])
    assert "'Qwen/Qwen-Image' was not found" in message and "the hub cannot be reached" in message
    assert "did you mean" not in message


@pytest.mark.extended
def test_unknown_key_and_wrong_type_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for line, told in (
        ("rollout: {num_worker: 2}", "num_worker"),
        ("rollout: {num_workers: two}", "rollout.num_workers must be an integer"),
    ):
        (folder / "mine.yaml").write_text(f"defaults: [one_step_off, _self_]\nname: mine\n{line}\n")
        arguments = ["--config-dir", str(folder), "--config-name", "mine", f"output_dir={tmp_path / 'run'}"]
        message = refused(arguments)
        assert told in message
        assert len(message.splitlines()) == 1
    (folder / "mine.yaml").write_text("name: mine\ntotal_steps: 3\n")
    assert "defaults" in refused(["--config-dir", str(folder), "--config-name", "mine"])
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("OC_CAUSE", "1")  # which OmegaConf takes for a debugger, and chains an error to itself
    assert "'weight'" in refused(["reward.terms={ocr: {weihgt: 2}}"])


def test_prompt_files(tmp_path: Path, refused: Refused) -> None:
    out = f"output_dir={tmp_path / 'run'}"
    empty, bare = tmp_path / "empty.txt", tmp_path / "bare.txt"
    empty.write_text("\n  \n")
    assert f"{empty} holds no prompts" in refused([f"data.train={empty}", HERE, out])
    bare.write_text('a sign that says "OPEN"\n\na sign that says nothing\n')
    message = refused(["reward=ocr", f"data.train={bare}", HERE, out])
    assert f"{bare}:3" in message
    assert "double quotes" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("report RUN --max-mib -1", "--max-mib"),
        ("report RUN --max-mib inf", "--max-mib"),
        (f"evaluate RUN --out {__file__}", "--out"),
        (f"benchmark --out {__file__}", "--out"),
        ("benchmark --devices 2 --split 5:3", "--split is of 8 devices, got --devices 2"),
        ("benchmark --steps 4", "--steps must be above 4 with the variant fully_async, got 4"),
    ],
)
def test_another_command_refuses_before_it_works(
    words: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["async-flowrl", *words.split()])
    with pytest.raises(SystemExit) as end:
        sys.exit(verb())
    assert end.value.code == 2 and named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["glyphs", "glyphs_edit", "glyphs_motion"])
def test_an_experiment_of_a_clone_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused([f"experiment={name}", "dry_run=true"])
    assert "model.path" in message and "clone" in message and len(message.splitlines()) == 1


def test_output_directory(tmp_path: Path, refused: Refused) -> None:
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "something").write_text("of mine")
    message = refused([f"output_dir={full}", HERE])
    assert f"output_dir={full} is not empty" in message
    assert "resume=auto" in message
    assert [entry.name for entry in full.iterdir()] == ["something"]
    file.write_text("")
    for more in ([], ["dry_run=true"], ["hydra.verbose=false"]):
        assert "is a file" in refused([f"output_dir={file}", HERE, *more])
    for place in ([f"output_dir={file}/run"], ["output_dir=/proc/run"], ["output_dir=/proc/run", "dry_run=true"]):
        # root may write anywhere, but not there
        assert "cannot be written" in refused([*place, HERE])


@pytest.mark.extended
@pytest.mark.parametrize("terms", ["reward.terms", "evaluate.reward.terms"])
def test_edits_of_another_shape_than_their_source(terms: str, tmp_path: Path, refused: Refused) -> None:
    Image.new("RGB", (24, 16)).save(tmp_path / "a.png")
    (tmp_path / "edits.jsonl").write_text('{"prompt": "blue", "image": "a.png"}\n')
    edits = [f"data.train={tmp_path / 'edits.jsonl'}", "data.held_out=0", f"{terms}={{edit_consistency: {{}}}}"]
    message = refused(["model=tiny_qwen_image_edit", *edits, HERE])
    assert "edit_consistency" in message and "16 × 24" in message


def test_more_workers_than_this_machine_holds(tmp_path: Path, refused: Refused) -> None:
    """The one refusal with a table: what was asked, pool by pool."""
    message = refused(["rollout.num_workers=5000", f"output_dir={tmp_path / 'run'}"])
    assert "5002 workers" in message.splitlines()[0]
    assert [line.split()[:2] for line in message.splitlines()[1:]] == [
        ["pool", "workers"],
        ["trainer", "1"],
        ["rollout", "5000"],
        ["reward", "1"],
    ]
    assert not (tmp_path / "run").exists()


def test_home_is_expanded_where_the_shell_leaves_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_expanded("output_dir=~/runs/a") == f"output_dir={tmp_path}/runs/a"
    assert home_expanded("~reward.terms.color") == "~reward.terms.color"
    assert home_expanded("--config-name") == "--config-name"
