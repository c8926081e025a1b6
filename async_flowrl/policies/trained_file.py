"""Files of trained weights, a LoRA or a whole transformer: checked, loaded into a diffusers pipeline, and written."""

import inspect
import logging
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.error_text import first_line, quieter
from async_flowrl.policies import lora_file
from async_flowrl.policies.registry import ResolvedModel, folder_of, weights_of
from async_flowrl.policies.stored import FILE, FOLDER, StoredWeights, check_fits


@torch.no_grad()
def apply(pipeline: Any, path: Path) -> None:
    """Loads the trained weights at `path` into a diffusers pipeline. Raises ValueError if they do not fit."""
    if not is_whole(path):
        apply_lora(pipeline, path)
        return
    state = pipeline.transformer.state_dict()
    dtype = next(pipeline.transformer.parameters()).dtype
    stored = StoredWeights(str(path.parent), dtype=dtype, folder=path.name)
    check_fits(path, stored, state, all_of=True)
    for name, tensor in state.items():
        tensor.copy_(stored[name])


CONFIG = "config.json"
# Largest size of one safetensors file.
SHARD = "5GB"


def save_whole(folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel) -> Path:
    """Writes a transformer in the dtypes of `model` to `folder`, which is never incomplete, and returns `folder`.

    Tensors that are not trained are the base model's. ValueError for one that is not in the model, or of another shape.
    """
    from huggingface_hub import save_torch_state_dict

    stored = weights_of(model)
    check_fits(folder, tensors, stored, all_of=False)
    state = {name: stored[name] for name in sorted(stored)}
    state |= {name: tensor.to(state[name].dtype).contiguous() for name, tensor in tensors.items()}
    work, old = (folder.with_name(f".{folder.name}-{what}") for what in ("unfinished", "old"))
    for leftover in (work, old):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copyfile(folder_of(model, "transformer") / FOLDER / CONFIG, work / CONFIG)
    pattern = FILE.replace(".safetensors", "{suffix}.safetensors")
    with quieter(inspect.getfile(save_torch_state_dict), logging.WARNING):  # the logger is named after the file
        save_torch_state_dict(state, work, filename_pattern=pattern, max_shard_size=SHARD)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def is_whole(path: Path) -> bool:
    """Returns True if `path` is the folder of a whole transformer."""
    return (path / CONFIG).is_file() and any(path.glob(f"{FILE.removesuffix('.safetensors')}*"))


_NAMED = re.compile(r"transformer\.(?P<module>.+)\.(lora_A|lora_B|lora\.down|lora\.up|lora_down|lora_up)\.weight")


def apply_lora(pipeline: Any, path: Path) -> None:
    """Loads the LoRA at `path` (diffusers, PEFT, kohya or ComfyUI) into the pipeline with `load_lora_weights`.

    diffusers itself ignores tensors that it does not recognise, and loads nothing from a PEFT folder. Raises
    ValueError, one sentence, if the file cannot be read, and if the model lacks a layer that the LoRA adapts.
    """
    file = lora_file.weights_file(path)
    if lora_file.is_peft(file):
        source = lora_file.read(file)
        with tempfile.TemporaryDirectory() as work:
            _load_lora(pipeline, lora_file.write(Path(work), source.tensors, alpha=source.alpha), path)
    else:
        _load_lora(pipeline, file, path)


def _load_lora(pipeline: Any, file: Path, where: Path) -> None:
    from async_flowrl.policies.pipeline_family import quiet

    options = {"weight_name": file.name, "use_safetensors": True}
    title = type(pipeline).__name__
    try:
        # The checks below replace diffusers' log lines about unknown names.
        with quiet(), quieter("diffusers.loaders", logging.CRITICAL):
            converted: Any = pipeline.lora_state_dict(str(file.parent), **options)
            _check_whole(converted, title)
            pipeline.load_lora_weights(str(file.parent), **options)
    except (ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"LoRA {where} cannot be loaded into {title}: {_reason(error)}") from error
    if not pipeline.get_list_adapters():
        first = min(converted, default="none at all")
        raise ValueError(f"LoRA {where}: none of its tensors belong to {title}; their names are such as {first}")
    adapted = {match["module"] for name in converted if (match := _NAMED.fullmatch(name))}
    if missing := sorted(adapted - {name.removesuffix(".lora_A") for name, _ in pipeline.transformer.named_modules()}):
        counts = f"{len(missing)} of {len(adapted)} layers"
        raise ValueError(f"LoRA {where} adapts {counts} that {title} does not have, e.g. {missing[0]}")


def _check_whole(converted: Mapping[str, Tensor], title: str) -> None:
    matches = [match for name in converted if (match := _NAMED.fullmatch(name)) is not None]
    matches = [match for match in matches if not match["module"].startswith("transformer.")]
    others = sorted(converted.keys() - {match.string for match in matches})
    if others and any(name.startswith("transformer.") for name in converted):
        raise ValueError(f"it has {others[0]}, which is no LoRA tensor of {title}'s transformer")
    if single := [name for name, count in Counter(match["module"] for match in matches).items() if count != 2]:
        raise ValueError(f"{single[0]} lacks one of its two matrices")
    lora_file.check_finite(converted, "it")


def _reason(error: BaseException) -> str:
    """Returns an error's message in one line; torch names the first mismatch only in the second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return " ".join(lines) if lines and lines[0].endswith(":") else first_line(error)
