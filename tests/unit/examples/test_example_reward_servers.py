"""Tests of the example reward servers with a small scorer instead of a model, called by the http reward."""

import asyncio
import hashlib
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.rewards.served import command_of
from async_flowrl.types import Prompt
from tests.support.reward_server import served

FOLDER = Path(__file__).parents[3] / "examples" / "reward_servers"
IMAGES = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKOUT = """
MY_CONFIG_PATH = MY_CKPT_PATH = None

def load_geneval():
    assert MY_CONFIG_PATH.endswith("/config.py") and MY_CKPT_PATH.endswith("/weights")
    assert open("reward_server/object_names.txt").read() == "cup\\n"

    def compute(images, rows, only_strict):
        assert not only_strict and all(image.size == (4, 4) for image in images)
        assert all(row["prompt"] == "two cups" and row["include"][0]["class"] == "cup" for row in rows)
        return [0.5] * len(rows), [1.0] * len(rows), [0.0] * len(rows), {}, {}

    return compute
"""


async def ask(url: str) -> list[Any]:
    return await HTTP(url)(IMAGES, Prompt(0, "a cup"))


def test_hpsv3() -> None:
    calls: list[int] = []

    def reward(pictures: list[Any], prompts: list[str]) -> Any:
        assert prompts == ["a cup"] * len(pictures)
        calls.append(len(pictures))
        return np.stack([[np.asarray(picture).mean(), math.log(0.5)] for picture in pictures])

    with served(example("hpsv3_server").scorer(reward, batch_size=2)) as url:
        found = asyncio.run(ask(url))
    assert found == [{"score": float(image.mean()), "sigma": 0.5} for image in IMAGES]
    assert calls == [2, 2, 1]


def test_image_reward() -> None:
    with served(example("image_reward_server").scorer(lambda prompt, picture: len(prompt) + picture.width)) as url:
        assert asyncio.run(ask(url)) == [9.0] * 5


def test_geneval_gets_the_rows_of_the_prompt_file_and_the_checkout_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the server's own loader: a checkout whose `load_geneval` stands in for the detector's."""
    (tmp_path / "reward_server").mkdir()
    (tmp_path / "reward_server" / "__init__.py").touch()
    (tmp_path / "reward_server" / "object_names.txt").write_text("cup\n")
    (tmp_path / "reward_server" / "gen_eval.py").write_text(CHECKOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = example("geneval_server")
    row = {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    with served(module.scorer(module.loaded(tmp_path, tmp_path / "config.py", tmp_path / "weights"))) as url:
        reply = asyncio.run(HTTP(url)(IMAGES[:2], Prompt(0, "two cups", metadata=row)))
        with pytest.raises(ServerError, match=r"422 .*a cup.* is no row of GenEval: it has no tag and no include"):
            asyncio.run(ask(url))
    assert reply == [{"score": 0.5, "correct": 1.0, "strict": 0.0}, {"score": 0.5, "correct": 1.0, "strict": 0.0}]


def git(*words: str, folder: Path) -> str:
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_geneval_clones_its_code_once_at_a_fixed_commit(tmp_path: Path) -> None:
    module, upstream = example("geneval_server"), tmp_path / "upstream"
    upstream.mkdir()
    git("init", folder=upstream)
    (upstream / "code.py").write_text("old")
    git("add", ".", folder=upstream)
    git("commit", "-m", "one", folder=upstream)
    commit = git("rev-parse", "HEAD", folder=upstream).strip()
    cache = tmp_path / "cache"
    checkout = module.cloned(cache, str(upstream), commit)
    assert (checkout / "code.py").read_text() == "old" and [each.name for each in cache.iterdir()] == [commit]
    assert module.cloned(cache, str(tmp_path / "gone"), commit) == checkout
    with pytest.raises(
        module.server.ServeError, match=r"git fetch of .*gone failed \(.*\); --checkout names a checkout"
    ):
        module.cloned(cache, str(tmp_path / "gone"), "0" * 40)
    assert [each.name for each in cache.iterdir()] == [commit], "a failure leaves nothing that the next start finds"


def test_geneval_takes_the_configuration_of_mmdet_and_checks_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("geneval_server")
    with pytest.raises(module.server.ServeError, match="mmdet is not installed; --config names"):
        module.config_of_mmdet()
    (tmp_path / "mmdet").mkdir()
    (tmp_path / "mmdet" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = tmp_path / "mmdet/.mim/configs/mask2former/mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco.py"
    assert module.config_of_mmdet() == expected
    (tmp_path / "weights").write_bytes(b"no weights")
    monkeypatch.setattr(module, "WEIGHTS", (tmp_path / "weights").as_uri())
    with pytest.raises(module.server.ServeError, match=r"cannot download .*invalid hash value.*; --weights names"):
        module.downloaded(tmp_path / "cache")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(b"no weights").hexdigest()[:8])
    folder = module.downloaded(tmp_path / "cache")
    assert [each.read_bytes() for each in folder.iterdir()] == [b"no weights"]


def test_geneval_finds_its_token_behind_the_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = example("geneval_server"), []
    (tmp_path / "checkout").mkdir()
    (tmp_path / "token").write_text("s3cret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "loaded", lambda checkout, *others: monkeypatch.chdir(checkout))

    def serve(score: object, given: Any, what: str) -> int:
        tokens.append(module.server.settings_of(given).token)
        return 0

    monkeypatch.setattr(module.server, "serve", serve)
    paths = ["--checkout", "checkout", "--config", "c", "--weights", "w", "--token-file", "token"]
    monkeypatch.setattr(sys, "argv", ["geneval_server.py", *paths])
    assert module.main() == 0 and tokens == ["s3cret"]


def test_they_need_nothing_of_ours_but_what_their_requirements_bring() -> None:
    servers = [str(FOLDER / f"{name}.py") for name in ("hpsv3_server", "image_reward_server", "geneval_server")]
    code = (
        "import runpy, sys; sys.modules.update("
        "dict.fromkeys(['torch', 'ray', 'hydra', 'omegaconf', 'httpx', 'tenacity']))\n"
        f"for path in {servers}:\n"
        "    sys.argv[:] = [path, '--host', '0.0.0.0']\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parents[1], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and ran.stdout.split() == ["2"] * len(servers), ran.stderr
    assert ran.stderr.count("--host 0.0.0.0 is not this machine alone") == len(servers), ran.stderr


def test_the_configurations_of_the_readme(tmp_path: Path) -> None:
    blocks = (FOLDER / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1:]
    (tmp_path / "reward").mkdir()
    for name, block in zip(("hpsv3", "unified_reward", "geneval"), blocks, strict=True):
        text = block.split("```")[0]
        (tmp_path / "reward" / f"{name}.yaml").write_text(text)
        assert OmegaConf.create(text).terms[name].serve.gpus == 1
        config = compose_config("one_step_off", [f"reward={name}"], tmp_path)
        check_rewards(config.reward)
        assert prompt_check(config.reward) is not None, "options of the right kinds: it can be built"
        serve = config.reward.terms[name].serve
        assert serve is not None
        files = [word for word in command_of(serve) if word.endswith((".py", ".txt"))]
        assert files and all((FOLDER.parents[1] / file).exists() for file in files)
