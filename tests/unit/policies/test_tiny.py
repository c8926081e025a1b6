"""Test of the tiny model: its bytes are the same wherever and however often it is built."""

import hashlib
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny import build_tiny
from tests.support.forked import CONTEXT


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()


def build_there(said: Connection, cache: str, own: str) -> None:
    """Runs in the other process: it builds the model when it is told to, with all that this takes imported before.

    Of two that build at once one takes the other's, so it then builds one in the folder `own`.
    """
    import async_flowrl.policies.qwen_image  # noqa: F401

    torch.set_num_threads(2)
    os.environ["ASYNC_FLOWRL_CACHE"] = cache
    said.send(hash("red"))
    said.recv()
    said.send(str(build_tiny(TinyConfig())))
    said.send(str(build_tiny(TinyConfig(), Path(own))))


@pytest.mark.serial("ranks")
def test_two_processes_at_once_build_the_same_bytes_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process and another one, which has two threads and hashes in an order of its own."""
    here, there = build_tiny(TinyConfig(), tmp_path / "here"), tmp_path / "there"
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(there))
    ours, theirs = CONTEXT.Pipe()
    other = CONTEXT.Process(target=build_there, args=(theirs, str(there), str(tmp_path / "theirs")), daemon=True)
    other.start()
    assert ours.recv() != hash("red") or "PYTHONHASHSEED" in os.environ
    ours.send("begin")
    built = build_tiny(TinyConfig())
    assert Path(ours.recv()) == built
    alone = Path(ours.recv())
    other.join(300)
    assert other.exitcode == 0
    assert digest(built) == digest(here) == digest(alone)
    assert [entry.name for entry in there.iterdir()] == [here.name]


def test_the_cache_is_used_and_its_key_is_the_configuration(tmp_path: Path) -> None:
    first = build_tiny(TinyConfig(), tmp_path)
    index = first / "model_index.json"
    before = index.stat().st_mtime_ns
    assert build_tiny(TinyConfig(), tmp_path) == first
    assert index.stat().st_mtime_ns == before
    others = [TinyConfig(layers=1), TinyConfig(heads=4), TinyConfig(contrast=1.0), TinyConfig(seed=1)]
    assert len({build_tiny(config, tmp_path) for config in others} | {first}) == 5


def test_global_random_states_are_untouched(tmp_path: Path) -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(2), np.random.rand(2), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    build_tiny(TinyConfig(), tmp_path)
    assert torch.equal(torch.rand(2), expected[0])
    assert np.array_equal(np.random.rand(2), expected[1])
    assert random.random() == expected[2]


def test_contrast_scales_the_last_convolution_and_the_seed_changes_the_network(tmp_path: Path) -> None:
    def vae(config: TinyConfig) -> dict[str, torch.Tensor]:
        return load_file(build_tiny(config, tmp_path) / "vae/diffusion_pytorch_model.safetensors")

    plain, strong = vae(TinyConfig(contrast=1.0)), vae(TinyConfig(contrast=3.0))
    different = [name for name in plain if not torch.equal(plain[name], strong[name])]
    assert different == ["decoder.conv_out.weight"]
    assert torch.allclose(3 * plain[different[0]], strong[different[0]])
    other = vae(TinyConfig(contrast=1.0, seed=1))
    assert not torch.equal(plain["decoder.conv_in.weight"], other["decoder.conv_in.weight"])


def test_the_template_is_as_long_as_the_pipeline_assumes(tmp_path: Path) -> None:
    pipeline = QwenImagePipeline.from_pretrained(build_tiny(TinyConfig(), tmp_path))
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer(prefix).input_ids) == pipeline.prompt_template_encode_start_idx == 34
    embeds, _ = pipeline.encode_prompt("red")
    assert embeds.shape[1] < 10


@pytest.mark.parametrize(("name", "value"), [("layers", 0), ("heads", 0), ("seed", -1), ("contrast", 0.0)])
def test_sizes_that_make_no_model_are_refused(name: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.tiny\.{name} must be .*{value}"):
        build_tiny(TinyConfig(**{name: value}), tmp_path)  # type: ignore[arg-type]
