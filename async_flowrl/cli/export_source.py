"""Reading of what is exported: a run directory, a checkpoint, or a LoRA of any format."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from async_flowrl.cli.generate import run_of, with_base
from async_flowrl.cli.options import of_option
from async_flowrl.config.compose import read_config
from async_flowrl.config.error_text import first_line
from async_flowrl.config.models import local_index
from async_flowrl.config.schema import Config, ModelConfig
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.lora_file import LoraFile
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.checkpoint import MANIFEST, checkpoint_step, find_checkpoint, read_checkpoint

logger = logging.getLogger(__name__)

PEFT = "peft"  # Folder of PEFT's files inside an exported folder.


@dataclass(frozen=True)
class Source:
    """A LoRA, or a transformer's trained tensors, with their origin; what is unknown is None."""

    weights: LoraFile | Mapping[str, Tensor]
    model: ModelConfig | None
    config: Config | None
    run: Path | None
    step: int | None
    part: str = "weights"  # `weights`, the trained weights, or `ema`, their moving average.

    @property
    def lora(self) -> LoraFile:
        """Raises ValueError where whole weights were trained."""
        if not isinstance(self.weights, LoraFile):
            raise ValueError("SOURCE is of a run with tune=full: there is no LoRA, only the whole transformer")
        return self.weights

    @property
    def whole(self) -> Mapping[str, Tensor] | None:
        return None if isinstance(self.weights, LoraFile) else self.weights


def read_source(path: Path, *, average: bool = True, base: str | None = None) -> Source:
    """Reads the newest sound checkpoint of a run, a checkpoint, or a LoRA. Raises ValueError if nothing can be read.

    `average` prefers the moving average (EMA) of the weights; `base` replaces the known base model.
    """
    if base is not None and not base.startswith("/"):  # such a path may be one of another machine
        local_index(base)
    if (checkpoint := _checkpoint(path)) is None:
        return _read_lora(path, base)
    run = checkpoint.parent.parent
    config = read_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    try:
        held = read_checkpoint(checkpoint)
    except ValueError as error:
        sound = find_checkpoint(checkpoint.parent)
        raise ValueError(f"{error}" + (f"; SOURCE={sound} is sound" if sound else "")) from error
    part = "ema" if average and "ema" in held.tensors else "weights"
    tensors, adapter, model = held.tensors[part], held.trainer["lora"], _model(base, config)
    weights: LoraFile | Mapping[str, Tensor] = tensors
    if adapter:
        rank = lora_file.rank_of(tensors, str(checkpoint))
        weights = LoraFile(dict(tensors), rank, float(adapter["alpha"]))
        _check_layers(weights, model, path, base)
    return Source(weights, model, config, run if config is not None else None, checkpoint_step(checkpoint), part)


def family_of(source: Source) -> str:
    if source.model is None:
        raise ValueError("--base is needed: SOURCE does not say which model it is for")
    return resolve_model(source.model).family


def write_lora(source: Source, out: Path) -> Path:
    base = source.model.path if source.model is not None else None
    lora_file.write_peft(out / PEFT, source.lora.tensors, alpha=source.lora.alpha, base=base)
    return lora_file.write(out, source.lora.tensors, alpha=source.lora.alpha, base=base)


def _checkpoint(path: Path) -> Path | None:
    if not path.exists():
        raise ValueError(f"{path} is not a folder or a file; give a run directory, a checkpoint or a LoRA")
    if path.is_file():
        return None
    if (path / MANIFEST).is_file():
        return path
    if (newest := find_checkpoint(path / "checkpoints") or find_checkpoint(path)) is not None:
        return newest
    if (path / "config.yaml").is_file() or not (lora_file.named_files(path) or any(path.glob("*.safetensors"))):
        raise ValueError(f"{path} holds no sound checkpoint (checkpoints/step_N with a {MANIFEST}) and is no LoRA")
    return None


def _read_lora(path: Path, base: str | None) -> Source:
    file = next(iter(lora_file.files_of(path).values()))
    run = run_of(path)
    config = read_config(run / "config.yaml") if run is not None else None
    model = _model(base or (None if config else lora_file.base_of(file)), config)
    try:
        lora = lora_file.read(file)
    except ValueError as error:
        if file.name == lora_file.PEFT_WEIGHTS:
            raise
        if model is None:
            raise ValueError(f"{error}; with --base it is read as the LoRA of that model, in any names") from error
        lora = lora_formats.read_back(file, resolve_model(model).family)
    lora_file.check_finite(lora.tensors, str(path))
    _check_layers(lora, model, path, base)
    return Source(lora, model, config, run, None)


def _check_layers(lora: LoraFile, model: ModelConfig | None, path: Path, base: str | None) -> None:
    # Raises ValueError for a layer that the model does not have, or has in another size; warns if nobody knows.
    if model is None:
        return
    reason = ""
    for weights in (model.weights, "random"):  # which builds published models from their descriptions in configs/
        try:
            resolved = resolve_model(replace(model, weights=weights))
            network = load_policy(resolved, dtype=resolved.dtype, device="cpu", parts="structure").transformer
            break
        except (ValueError, OSError) as error:
            reason = reason or first_line(error)
    else:
        if base is not None:
            logger.warning("whether the LoRA fits %s is not known: %s", base, of_option(reason, "--base", base))
        return
    shapes = {name.removesuffix(".weight"): tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for module in lora_file.modules_of(lora.tensors):
        a, b = (lora.tensors[f"{module}.lora_{side}.weight"] for side in "AB")
        if shapes.get(module) != (b.shape[0], a.shape[1]):
            finding = f"is {list(shapes[module])} there" if module in shapes else "is not there"
            raise ValueError(f"{path} does not fit {model.path}: its layer {module} {finding}")


def _model(base: str | None, config: Config | None) -> ModelConfig | None:
    if config is None and base is None:
        return None
    trained_on = config.model if config is not None else ModelConfig(path=str(base))
    # What is exported is for the model in its files, also if the run stored it in fewer bits.
    return with_base(replace(trained_on, quantize=None, quantize_text_encoder=None), base)
