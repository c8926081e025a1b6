"""Checks of a whole configuration before anything is started: the rule of each field, and conflicts between fields.

Every error message is one sentence.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from async_flowrl.config.devices import nccl_obstacle, ranks_on_one_device
from async_flowrl.config.elastic import bounds, elastic_obstacle
from async_flowrl.config.environment import environment_refusal
from async_flowrl.config.guidance import guidance_refusal
from async_flowrl.config.messages import unknown_name
from async_flowrl.config.nodes import node_obstacle
from async_flowrl.config.removed import removed
from async_flowrl.config.resolution import configured
from async_flowrl.config.reward_pools import scoring_pools
from async_flowrl.config.schema import LORA, Config
from async_flowrl.config.settings import settings
from async_flowrl.config.shared import shared_obstacle


class ConfigError(ValueError):
    """Raised for a configuration that cannot run; the message is one sentence for its author."""


MEANT_STALENESS = {"sync": "0", "stream": "0", "one_step_off": "1", "fully_async": "2 or more"}
"""Mode → the `max_staleness` that it stands for, in words."""


def check(config: Config) -> None:
    """Raises ConfigError for values or combinations that cannot work on any machine."""
    check_fields(config)
    _check_mode(config)
    _check_sizes(config)
    _check_placement(config)
    _check_devices(config)
    _check_trainer(config)
    _check_tune(config)
    _check_reward_pools(config)
    _check_group_setup(config)
    _check_environment(config)
    _check_engine(config)


def check_fields(section: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first field whose value breaks its rule (settings.py).

    `prefix` is the section's key with a dot, for messages; empty for the whole configuration.
    """
    for key, value, rule in settings(section, prefix):
        if value is None:
            continue
        if rule.choices and value not in rule.choices:
            raise ConfigError(unknown_name(key, str(value), rule.choices))
        if wanted := rule.refusal(value):
            raise ConfigError(f"{key} must be {wanted}, got {value}")


def _check_mode(config: Config) -> None:
    given, named = config.mode, config.mode_name
    if given in (None, named):
        return
    if (meant := MEANT_STALENESS[given]) != MEANT_STALENESS[named]:
        raise ConfigError(f"mode={given} means max_staleness={meant}, got {config.max_staleness}")
    hand_over = "batch" if given == "sync" else "stream"
    raise ConfigError(f"mode={given} means hand_over={hand_over}, got {config.hand_over}")


def _check_sizes(config: Config) -> None:
    try:
        configured(config.rollout)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.group_size % config.images_per_ticket:
        raise ConfigError(f"ticket_size={config.ticket_size} must divide group_size={config.group_size}")
    if refusal := guidance_refusal("rollout.true_cfg_scale", config.rollout.true_cfg_scale):
        raise ConfigError(refusal)


def _check_placement(config: Config) -> None:
    if config.runtime.backend == "local" and config.trainer.num_workers > 1:
        raise ConfigError(
            "runtime.backend=local has all workers in one process, which holds one trainer rank, got "
            f"trainer.num_workers={config.trainer.num_workers}"
        )
    if config.runtime.backend == "local" and config.runtime.numa_binding:
        raise ConfigError(
            "runtime.numa_binding=true binds processes to the CPUs beside their GPUs, and with runtime.backend=local "
            "workers are threads of one process: use runtime.backend=ray"
        )
    if obstacle := shared_obstacle(config) or node_obstacle(config) or elastic_obstacle(config):
        raise ConfigError(obstacle)


def _check_devices(config: Config) -> None:
    if obstacle := ranks_on_one_device(config):
        raise ConfigError(f"{obstacle}, where NCCL cannot connect them: ask for more than half a GPU each, or for none")
    transport = config.checkpoint_engine.transport
    if transport in ("nccl", "pynccl") and (obstacle := nccl_obstacle(config)):
        raise ConfigError(
            f"checkpoint_engine.transport={transport} needs a GPU of its own for the trainer and for every rollout "
            f"worker, but {obstacle}: use gloo, object_store or auto"
        )


def _check_trainer(config: Config) -> None:
    trainer, rollout = config.trainer, config.rollout
    if trainer.cpu_offload and trainer.shard == "none":
        raise ConfigError(
            "trainer.cpu_offload=true is FSDP2's, which shards the base: set trainer.shard to full or auto, got none"
        )
    spread = [("trainer", "a trainer rank", trainer.gpus_per_worker)]
    if rollout.engine != "vllm_omni":
        spread.append(("rollout", f"a rollout worker with rollout.engine={rollout.engine}", rollout.gpus_per_worker))
    for pool, what, gpus in spread:
        if gpus > 1:
            raise ConfigError(
                f"{pool}.gpus_per_worker={gpus:g}, but {what} computes on one GPU and would leave the others idle: use "
                f"more {pool}.num_workers"
            )


def _check_tune(config: Config) -> None:
    """Raises ConfigError for settings that tune=lora or tune=full cannot have."""
    if config.tune == LORA:
        if config.full.freeze:
            raise ConfigError(
                f"full.freeze={config.full.freeze} is for tune=full; tune=lora freezes the whole base model"
            )
        return
    trainer = config.trainer
    if config.lora.path is not None:
        raise ConfigError(
            f"lora.path={config.lora.path} is for tune=lora: to start tune=full at a LoRA, write it into a model's "
            "weights (async-flowrl export … --merged) and give that folder as model.path"
        )
    if trainer.shard == "hybrid":
        raise ConfigError(
            "tune=full has every trainer rank hold all of the weights (trainer.shard=none) or one share of them "
            "(full); trainer.shard=hybrid is for tune=lora"
        )
    if trainer.cpu_offload:
        raise ConfigError("trainer.cpu_offload=true offloads a frozen base, and tune=full has none: set it to false")
    if config.rollout.engine != "diffusers":
        raise ConfigError(
            "tune=full delivers whole weights, which rollout.engine=diffusers alone puts into its network, got "
            f"{config.rollout.engine}"
        )


def _check_reward_pools(config: Config) -> None:
    for pool in scoring_pools(config):
        gpus = pool.gpus_per_worker
        if gpus > 1 and gpus != int(gpus):
            raise ConfigError(
                f"{pool.section}.gpus_per_worker above 1 must be a whole number of GPUs, got {gpus:g}: a fraction is a "
                "share of one"
            )


def _check_group_setup(config: Config) -> None:
    """Raises ConfigError if the setup of a collective transport's group may take longer than `deadlines.publish`.

    Setup runs on the lane (worker thread) that publishes, so calls that wait for it are limited by that deadline.
    """
    _, workers = bounds(config.rollout)
    seconds = config.checkpoint_engine.setup_seconds + 0.1 * (workers + 1)
    transport = config.checkpoint_engine.transport
    if transport == "object_store" or (transport == "auto" and nccl_obstacle(config)):
        return
    if seconds >= config.deadlines.publish:
        raise ConfigError(
            f"deadlines.publish={config.deadlines.publish:g} leaves no time beside making a group of "
            f"{workers} rollout workers, which may take {seconds:g} s by "
            "checkpoint_engine.setup_seconds: give it more, or the group less"
        )


def _check_environment(config: Config) -> None:
    for pool in ("rollout", "trainer", "reward"):
        environment = getattr(config, pool).environment
        if refusal := environment_refusal(f"{pool}.environment", environment, config.runtime.backend):
            raise ConfigError(refusal)


def _check_engine(config: Config) -> None:
    if config.rollout.engine != "vllm_omni":
        return
    if config.runtime.backend != "ray":
        raise ConfigError(
            "rollout.engine=vllm_omni claims its process's torch.distributed world, so it needs runtime.backend=ray, "
            f"got {config.runtime.backend}"
        )
    if config.placement != "separate":
        raise ConfigError(
            "rollout.engine=vllm_omni keeps its device's memory for itself, so it needs placement=separate, "
            f"got {config.placement}"
        )
    if config.rollout.compile:
        raise ConfigError(
            "rollout.compile=true is for rollout.engine=diffusers: the adapters of vllm_omni break compiled graphs"
        )
    if config.rollout.text_encoder == "cached":
        raise ConfigError(
            "rollout.text_encoder=cached is for rollout.engine=diffusers, as vllm_omni does not give its network's "
            "memory away: use offload"
        )
    gpus = config.rollout.gpus_per_worker
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            "rollout.gpus_per_worker is the tensor parallel size of rollout.engine=vllm_omni, so above 1 it must be a "
            f"whole number, got {gpus:g}"
        )


def section_or_null(kind: Any) -> Any:
    """Returns the dataclass of a field that may also be None; any other type is returned unchanged."""
    return next((part for part in get_args(kind) if is_dataclass(part) and type(None) in get_args(kind)), kind)


def unknown_keys(values: Mapping[str, Any], schema: type[Any], prefix: str = "") -> list[str]:
    """Returns a sentence for every key that the schema lacks; Hydra accepts `+key=value` for any key."""
    hints = get_type_hints(schema)
    known = {f.name for f in fields(schema)}
    sentences = []
    for key, value in values.items():
        if str(key) not in known:
            unknown = f"configuration key {prefix}{key} is unknown: " + unknown_name("it", str(key), known)
            sentences.append(removed(f"{prefix}{key}") or unknown)
            continue
        if not isinstance(value, Mapping):
            continue
        kind = section_or_null(hints[str(key)])
        if isinstance(kind, type) and is_dataclass(kind):
            sentences.extend(unknown_keys(value, kind, f"{prefix}{key}."))
        elif get_origin(kind) is dict and isinstance(entry := get_args(kind)[1], type) and is_dataclass(entry):
            for name, inner in value.items():
                if isinstance(inner, Mapping):
                    sentences.extend(unknown_keys(inner, entry, f"{prefix}{key}.{name}."))
    return sentences
