"""Tests of `model.dtype=auto`, which reads the headers of the transformer's files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.memory.rehearsal.model import architecture
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.tiny import build_tiny

FILE = "diffusion_pytorch_model.safetensors"


def model_of(folder: Path, dtype: torch.dtype, *, kept: str = "", shards: int = 1) -> Path:
    """A tiny model cast to `dtype`, but for the names that begin with `kept`; its files and their index."""
    model = Path(shutil.copytree(build_tiny(TinyConfig()), folder / "model"))
    weights = load_file(model / "transformer" / FILE)
    cast = {n: t if kept and n.startswith(kept) else t.to(dtype) for n, t in weights.items()}
    if shards == 1:
        save_file(cast, model / "transformer" / FILE)
        return model
    (model / "transformer" / FILE).unlink()
    files = {name: f"part-{place % shards}.safetensors" for place, name in enumerate(sorted(cast))}
    for file in set(files.values()):
        save_file({name: cast[name] for name in cast if files[name] == file}, model / "transformer" / file)
    (model / "transformer" / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
    return model


@pytest.mark.parametrize("shards", [1, 3])
def test_most_bytes_decide(tmp_path: Path, shards: int) -> None:
    """Norms are often kept in float32."""
    model = model_of(tmp_path, torch.bfloat16, kept="norm_out", shards=shards)
    assert resolve_model(ModelConfig(path=str(model))).dtype == "bfloat16"


def test_published_models_are_planned_in_what_their_files_hold() -> None:
    from async_flowrl.config.schema import Config

    config = Config()
    for path, dtype in (("Qwen/Qwen-Image", "bfloat16"), ("Tongyi-MAI/Z-Image-Turbo", "float32")):
        config.model.path = path
        assert architecture(config)[1] == dtype
    config.model.dtype = "bfloat16"
    assert architecture(config)[1] == "bfloat16"
