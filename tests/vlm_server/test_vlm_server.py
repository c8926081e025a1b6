"""Tests of `vlm_judge` at vllm's own server with a real model: probabilities, a grammar, and a run that starts it."""

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.vlm_judge import Picture, VLMJudge
from async_flowrl.types import Prompt
from separation.program import Program
from tests.integration.left_behind import left_behind
from tests.integration.runs import ROOT, train
from tests.support.ports import free_port
from tests.support.tiny_judge import first_log_probs
from tests.vlm_server.model import SIDE, tiny_vlm, write

VLLM = Path(os.environ.get("VLM_SERVER_VENV", ROOT / ".venv-vlm-server")) / "bin" / "vllm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.skipif(not VLLM.exists(), reason=f"there is no {VLLM}: `make test-vlm-server` installs it"),
]

PROMPT = Prompt(0, 'a red sign "abc"', target="abc")
IMAGES = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
ANSWERS = {str(number): float(number) for number in range(1, 6)}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
OPTIONS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"]
PROBABILITIES = ["--logprobs-mode", "processed_logprobs"]
"""Probabilities after a grammar or a bias has had its say; without it those that the model had before."""
GRAMMAR = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
"""Without it the grammar of JSON allows blanks without end, and random weights write nothing else."""
START_SECONDS = 300.0


def command(folder: Path, host: str, port: str) -> list[str]:
    served = ["--served-model-name", "tiny", "--host", host, "--port", port]
    return [str(VLLM), "serve", str(folder), *served, *OPTIONS, *PROBABILITIES, *GRAMMAR]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("logs") / "vllm.log"
    environment = {**os.environ, **ENVIRONMENT}
    server = Program(command(folder, "127.0.0.1", str(port)), environment=environment, log=log, grace=10.0)
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(port):
            assert server.exit_code() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.stop()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ask(reward: VLMJudge, images: Any = IMAGES) -> list[dict[str, Any]]:
    return asyncio.run(reward(images, PROMPT))


def test_the_score_is_the_expectation_of_the_models_probabilities(url: str) -> None:
    """The server's numbers are those of transformers, with other kernels: of each image, and of the listed answers."""
    question = "{prompt}: 1 to 5?"
    tokenizer, model = tiny_vlm()
    ids = {answer: int(tokenizer.convert_tokens_to_ids(answer)) for answer in ANSWERS}
    bias = dict.fromkeys(ids.values(), 20.0)
    extra = {"logit_bias": {str(token): value for token, value in bias.items()}}
    options: dict[str, Any] = {"answers": ANSWERS, "prompt_template": question, "min_mass": 0.9, "extra_body": extra}
    results = ask(VLMJudge(url, "tiny", "probabilities", **options))
    for image, result in zip(IMAGES, results, strict=True):
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": Picture(image).url}},
            {"type": "text", "text": question.replace("{prompt}", PROMPT.text)},
        ]
        log_probs = first_log_probs(tokenizer, model, parts, bias)
        expected = {answer: float(log_probs[token].exp()) for answer, token in ids.items()}
        assert {answer: result[f"p.{answer}"] for answer in ANSWERS} == pytest.approx(expected, rel=1e-3)
        mean = sum(ANSWERS[answer] * p for answer, p in expected.items()) / sum(expected.values())
        assert result["score"] == pytest.approx(mean, rel=1e-3)
    assert len({result["score"] for result in results}) == len(IMAGES), "the model does not look at the image"


def test_a_grammar_makes_a_model_of_random_weights_write_a_score(url: str) -> None:
    free = VLMJudge(url, "tiny", "score", structured=False, max_tokens=64)
    with pytest.raises(ServerError, match=r"the judge's answer is no JSON.*3 of 3 calls failed"):
        ask(free)
    for result in ask(VLMJudge(url, "tiny", "score", max_tokens=256)):
        said = json.loads(str(result["text"]))
        assert list(said) == ["score"] and 0 <= said["score"] <= 10
        assert result["score"] == pytest.approx(said["score"] / 10)


def test_a_grammar_makes_it_write_one_score_per_image_of_a_group(url: str) -> None:
    results = ask(VLMJudge(url, "tiny", "score", images="group", max_tokens=256), IMAGES[:2])
    said = json.loads(str(results[0]["text"]))["scores"]
    assert [result["score"] for result in results] == pytest.approx([number / 10 for number in said])


def judged(folder: Path, **options: Any) -> list[str]:
    """Overrides of a run that starts the server itself and is trained by its probabilities alone."""
    choice = {"structured_outputs": {"choice": list(ANSWERS)}}
    given = {"model": "tiny", "mode": "probabilities", "answers": ANSWERS, "extra_body": choice, **options}
    serve = {
        "command": command(folder, "{host}", "{port}"),
        "environment": {**ENVIRONMENT, "VLLM_API_KEY": "{token}"},
        "start_seconds": START_SECONDS,
    }
    term = json.dumps({"name": "vlm_judge", "options": given, "serve": serve})
    term = re.sub(r'"(\w+)": ', r"\1: ", term)  # Hydra's grammar has keys without quotes
    return ["~reward", f"+reward={{terms: {{judge: {term}}}}}", "total_steps=3"]


def test_a_run_starts_the_server_and_trains_by_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder)
    run = train(tmp_path / "run", "one_step_off", *judged(tmp_path / "model"))
    scores = [line["reward/judge/mean"] for line in run.metrics]
    assert len(scores) == 3 and all(1 <= score <= 5 for score in scores)
    assert all(line["reward/judge/group_std"] > 0 for line in run.metrics), "it scores all images alike"
    assert run.summary["workers"]["server/judge"] == 1
    assert not left_behind(tmp_path)
