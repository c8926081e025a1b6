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

from async_flowrl.config.error_text import first_line, quieter, shortened
from async_flowrl.policies import lora_file
from async_flowrl.policies.registry import ResolvedModel, folder_of, weights_of
from async_flowrl.policies.stored import EXPERTS, FILE, FOLDER, StoredWeights, check_fits, network_folders, prefixes


@torch.no_grad()
def apply(pipeline: Any, path: Path) -> None:
    """Loads the trained weights at `path` into a diffusers pipeline. Raises ValueError if they do not fit."""
    if not is_whole(path):
        apply_lora(pipeline, path)
        return
    for expert in experts_of(pipeline):
        network, folder = getattr(pipeline, expert), path if expert == FOLDER else path.with_name(expert)
        state, dtype = network.state_dict(), next(network.parameters()).dtype
        stored = StoredWeights(str(folder.parent), dtype=dtype, folders=[folder.name])
        check_fits(folder, stored, state, all_of=True)
        for name, tensor in state.items():
            tensor.copy_(stored[name])


def experts_of(pipeline: Any) -> list[str]:
    return [name for name in EXPERTS if getattr(pipeline, name, None) is not None]


CONFIG = "config.json"
# Largest size of one safetensors file.
SHARD = "5GB"


def save_whole(folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel) -> Path:
    """Writes a transformer in the dtypes of `model` to `folder`, which is never incomplete, and returns `folder`.

    A second expert gets the folder `transformer_2` beside it, and is renamed after the first: a kill between the two
    leaves a new transformer beside an old transformer_2, or none, until it is written again. Tensors that are not
    trained are the base model's. ValueError for one that is not in the model, or of another shape.
    """
    stored, base = weights_of(model), folder_of(model, "transformer")
    check_fits(folder, tensors, stored, all_of=False)
    written = {}
    for expert, prefix in prefixes(network_folders(str(base))).items():
        state = {name.removeprefix(prefix): stored[name] for name in sorted(stored) if name.startswith(prefix)}
        for name, kept in state.items():
            if (tensor := tensors.get(prefix + name)) is not None:
                state[name] = tensor.to(kept.dtype).contiguous()
        target = folder if expert == FOLDER else folder.with_name(expert)
        written[target] = _write_network(target, state, base / expert / CONFIG)
    for target, work in written.items():
        old = target.with_name(f".{target.name}-old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        work.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _write_network(target: Path, state: dict[str, Tensor], config: Path) -> Path:
    from huggingface_hub import save_torch_state_dict

    work = target.with_name(f".{target.name}-unfinished")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copyfile(config, work / CONFIG)
    pattern = FILE.replace(".safetensors", "{suffix}.safetensors")
    with quieter(inspect.getfile(save_torch_state_dict), logging.WARNING):  # the logger is named after the file
        save_torch_state_dict(state, work, filename_pattern=pattern, max_shard_size=SHARD)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    return work


def is_whole(path: Path) -> bool:
    """Returns True if `path` is the folder of a whole transformer."""
    return (path / CONFIG).is_file() and any(path.glob(f"{FILE.removesuffix('.safetensors')}*"))


_NAMED = re.compile(r"transformer\.(?P<module>.+)\.(lora_A|lora_B|lora\.down|lora\.up|lora_down|lora_up)\.weight")


def apply_lora(pipeline: Any, path: Path) -> None:
    """Loads the LoRA at `path` (diffusers, PEFT, kohya or ComfyUI) into the pipeline with `load_lora_weights`.

    diffusers itself ignores tensors that it does not recognise, and loads nothing from a PEFT folder. Raises
    ValueError, one sentence, if the file cannot be read, and if the model lacks a layer that the LoRA adapts.
    """
    with tempfile.TemporaryDirectory() as work:
        if lora_file.is_peft(lora_file.weights_file(path)):
            source = lora_file.read(path)
            files = lora_file.files_of(lora_file.write(Path(work), source.tensors, alpha=source.alpha))
        else:
            files = lora_file.files_of(path)
        experts = experts_of(pipeline)
        if len(files) != len(experts):
            raise ValueError(
                f"LoRA {path} is for {len(files)} networks, {type(pipeline).__name__} of this model has {len(experts)}"
            )
        for expert, file in zip(experts, files.values(), strict=True):
            _load_lora(pipeline, file, path, expert)


def _load_lora(pipeline: Any, file: Path, where: Path, expert: str) -> None:
    from async_flowrl.policies.pipeline_family import quiet

    options: dict[str, Any] = {"weight_name": file.name, "use_safetensors": True}
    title, second = type(pipeline).__name__, {"load_into_transformer_2": True} if expert != FOLDER else {}
    try:
        # The checks below replace diffusers' log lines about unknown names.
        with quiet(), quieter("diffusers.loaders", logging.CRITICAL):
            converted: Any = pipeline.lora_state_dict(str(file.parent), **options)
            _check_whole(converted, title)
            pipeline.load_lora_weights(str(file.parent), **options, **second)
    except (ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"LoRA {where} cannot be loaded into {title}: {_reason(error)}") from error
    if expert not in pipeline.get_list_adapters():
        first = min(converted, default="none at all")
        raise ValueError(f"LoRA {where}: none of its tensors belong to {title}; their names are such as {first}")
    adapted = {match["module"] for name in converted if (match := _NAMED.fullmatch(name))}
    layers = {name.removesuffix(".lora_A") for name, _ in getattr(pipeline, expert).named_modules()}
    if missing := sorted(adapted - layers):
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
    """Returns an error's message in one short line; torch names the first mismatch only in the second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    reason = " ".join(lines) if lines and lines[0].endswith(":") else first_line(error)
    return shortened(reason, 300)  # PEFT lists all layers
