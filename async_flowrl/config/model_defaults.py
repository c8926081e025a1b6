"""Defaults that depend on the model: the settings that are null in a configuration until its family is known.

Every Config takes them from configs/family/ when it is made, so that no value of the tiny model reaches a real one in
silence.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from async_flowrl.config.model_path import KNOWN, PIPELINES, TINY, local_index
from async_flowrl.config.paths import config_dir
from async_flowrl.config.resolution import configured, in_pixels, pixels
from async_flowrl.config.schema import FULL, Config, ModelConfig

TOY, OTHER = "toy", "other"
"""Files of configs/family/ for tiny models, which come before their family's, and for families that have none."""
TOY_BYTES = 100_000_000
"""A folder with fewer bytes of weights is a tiny model."""
MICRO_BATCH = 16
"""Largest `trainer.micro_batch_size` that is a default."""
LEAST_PIXELS, FASTEST, WIDEST_CLIP = 256 * 256, {False: 1e-3, True: 1e-4}, 1e-2
"""What a real model is trained with: images of at least so many pixels, a learning rate (by whether all weights are
trained) and a clip_range of at most so much."""


def fill_defaults(config: Config) -> None:
    """Replaces the settings that are null by the defaults of the configuration's model."""
    rollout, trainer = config.rollout, config.trainer
    given = (config.lora.rank, rollout.resolution, rollout.num_inference_steps, rollout.true_cfg_scale)
    if None in (*given, rollout.guidance_scale, trainer.learning_rate):
        family = family_of(config.model)
        for name in (TOY, family) if is_toy(config.model) else (family,):
            values = _values(name)
            _fill(config.lora, values["lora"])
            _fill(rollout, values["rollout"])
            _fill(trainer, {"learning_rate": values["trainer"]["learning_rate"] * (0.01 if config.tune == FULL else 1)})
    _fill(config.lora, {"alpha": 2.0 * config.lora.rank})
    pair = 2 if config.algorithm.name == "dpo" else 1
    fitting = [size for size in range(1, MICRO_BATCH + 1) if config.group_size % size == 0]
    _fill(trainer, {"micro_batch_size": max(pair, *fitting)})


def _fill(section: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if getattr(section, key) is None:
            setattr(section, key, value)


@functools.cache
def _values(name: str) -> dict[str, dict[str, Any]]:
    loaded = OmegaConf.to_container(OmegaConf.load(config_dir() / "family" / f"{name}.yaml"))
    return cast("dict[str, dict[str, Any]]", loaded)


def family_of(model: ModelConfig) -> str:
    """Returns the name of a file in configs/family/ for the model's family; `other` if there is none.

    A model that cannot be found is `other`, too: what needs it says why it was not found.
    """
    name = model.family
    if name == "auto":
        name = model.tiny.family if model.path == TINY else _family_of_files(model)
    return name if (config_dir() / "family" / f"{name}.yaml").is_file() else OTHER


def _family_of_files(model: ModelConfig) -> str:
    from async_flowrl.config.hub import hub_file

    try:
        index = local_index(model.path)
        if index is None and model.path in KNOWN:
            return KNOWN[model.path].family
        index = index or hub_file(model.path, "model_index.json", model.revision)
        return PIPELINES.get(json.loads(index.read_text()).get("_class_name"), OTHER)
    except (OSError, ValueError, AttributeError):
        return OTHER


def is_toy(model: ModelConfig) -> bool:
    """Returns True for `model.path=tiny`, and for a folder with weights that take less than TOY_BYTES."""
    weights = Path(model.path).expanduser().glob("*/*.safetensors")
    return model.path == TINY or 0 < sum(file.stat().st_size for file in weights) < TOY_BYTES


def toy_values(config: Config) -> str | None:
    """Returns a sentence on the values that suit tiny models alone, if the configuration's model is a real one."""
    if is_toy(config.model):
        return None
    trainer, algorithm, fastest = config.trainer, config.algorithm, FASTEST[config.tune == FULL]
    given = [f"images of {in_pixels(size)}" for size in configured(config.rollout) if pixels(size) < LEAST_PIXELS]
    if trainer.learning_rate > fastest:
        given.append(f"trainer.learning_rate={trainer.learning_rate:g}")
    if algorithm.clip_unit == "mean" and algorithm.clip_range > WIDEST_CLIP:
        given.append(f"algorithm.clip_range={algorithm.clip_range:g}")
    said = f"{', '.join(given)}: what suits tiny models alone, and model.path={config.model.path} is a real one"
    return said if given else None
