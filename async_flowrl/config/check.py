"""What a configuration must satisfy before anything is started. Every refusal is one sentence."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from async_flowrl.config.messages import unknown_name
from async_flowrl.config.schema import Config


class ConfigError(ValueError):
    """The configuration cannot run; the message is one sentence for the person who wrote it."""


MODES = {"sync": "batch", "stream": "stream", "one_step_off": None, "fully_async": None}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "mode": tuple(MODES),
    "hand_over": ("batch", "stream"),
    "placement": ("separate", "colocated"),
    "rollout.engine": ("diffusers", "vllm_omni"),
    "model.dtype": ("float32", "bfloat16"),
    "reward.on_error": ("fail", "skip"),
    "checkpoint_engine.transport": ("object_store", "gloo", "nccl", "pynccl", "auto"),
    "runtime.backend": ("ray", "local"),
    "trainer.lr_schedule": ("constant", "linear", "cosine"),
}
AT_LEAST: Mapping[str, float] = {
    "total_steps": 1,
    "epochs": 1,
    "prompts_per_step": 1,
    "group_size": 2,
    "max_staleness": 0,
    "rollout.num_workers": 1,
    "rollout.num_inference_steps": 2,
    "rollout.resolution": 1,
    "rollout.batch_size": 1,
    "rollout.threads": 1,
    "trainer.num_workers": 1,
    "trainer.micro_batch_size": 1,
    "trainer.updates_per_batch": 1,
    "trainer.threads": 1,
    "trainer.prefetch": 0,
    "reward.num_workers": 1,
    "reward.retries": 0,
    "save.every": 0,
    "save.keep": 1,
    "evaluate.every": 0,
    "evaluate.images_per_prompt": 1,
    "evaluate.max_prompts": 1,
    "evaluate.num_inference_steps": 1,
    "trainer.ema_every": 1,
    "trainer.warmup_steps": 0,
    "trainer.weight_decay": 0,
    "rollout.true_cfg_scale": 0,
    "rollout.guidance_scale": 0,
    "lora.rank": 1,
    "debug.delays.slow_worker": 1,
}

ABOVE_ZERO = (
    "trainer.learning_rate",
    "trainer.max_grad_norm",
    "trainer.eps",
    "lora.alpha",
    "time_limit",
    "hardware.peak_tflops",
    "deadlines.load",
    "deadlines.generate",
    "deadlines.score",
    "deadlines.publish",
    "deadlines.update",
    "deadlines.stall",
)
SHARES = ("trainer.betas", "trainer.ema_decay")
"""0 up to, but not including, 1."""
PAIRS = ("trainer.betas", "algorithm.sde_window_range")


def check(config: Config) -> None:
    """Raises ConfigError for values that cannot be right on any machine."""
    for key, allowed in CHOICES.items():
        value = _get(config, key)
        if value not in allowed:
            raise ConfigError(unknown_name(key, str(value), allowed))
    for key, least in AT_LEAST.items():
        value = _get(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key} must be at least {least:g}, got {value}")
    _check_ranges(config)
    _check_mode(config)
    _check_sizes(config)
    _check_placement(config)
    _check_engine(config)


def _check_ranges(config: Config) -> None:
    for key in ABOVE_ZERO:
        value = _get(config, key)
        if value is not None and not value > 0:
            raise ConfigError(f"{key} must be above 0, got {value}")
    for key in PAIRS:
        value = _get(config, key)
        if value is not None and len(value) != 2:
            raise ConfigError(f"{key} must be two numbers, got {list(value)}")
    for key in SHARES:
        value = _get(config, key)
        numbers = value if isinstance(value, tuple | list) else [value]
        if not all(number is None or 0 <= number < 1 for number in numbers):
            raise ConfigError(f"{key} must be from 0 to below 1, got {value}")


def _check_mode(config: Config) -> None:
    staleness = config.max_staleness
    wanted = {
        "sync": staleness == 0,
        "stream": staleness == 0,
        "one_step_off": staleness == 1,
        "fully_async": staleness >= 2,
    }
    if not wanted[config.mode]:
        need = {"sync": "0", "stream": "0", "one_step_off": "1", "fully_async": "2 or more"}[config.mode]
        raise ConfigError(f"mode={config.mode} means max_staleness={need}, got {staleness}")
    hand_over = MODES[config.mode]
    if hand_over and config.hand_over != hand_over:
        raise ConfigError(f"mode={config.mode} means hand_over={hand_over}, got {config.hand_over}")


def _check_sizes(config: Config) -> None:
    size = config.images_per_ticket
    if size < 1 or config.group_size % size:
        raise ConfigError(f"ticket_size={size} must divide group_size={config.group_size}")
    together = config.trainer.timesteps_per_forward
    if together is not None and together < 1:
        raise ConfigError(f"trainer.timesteps_per_forward must be at least 1, or null for all of them, got {together}")
    if not config.reward.terms:
        raise ConfigError("reward.terms is empty: name at least one reward, for example reward=ocr")


def _check_placement(config: Config) -> None:
    if config.runtime.backend == "local" and config.trainer.num_workers > 1:
        raise ConfigError(
            "runtime.backend=local has all workers in one process, which holds one trainer rank, got "
            f"trainer.num_workers={config.trainer.num_workers}"
        )
    if config.placement != "colocated":
        return
    if config.max_staleness or config.hand_over != "batch":
        raise ConfigError(
            "placement=colocated shares each device between rollout and trainer, so it needs max_staleness=0 and "
            f"hand_over=batch, got max_staleness={config.max_staleness} and hand_over={config.hand_over}"
        )
    if config.rollout.num_workers != config.trainer.num_workers:
        raise ConfigError(
            "placement=colocated puts one rollout worker beside each trainer rank, got "
            f"rollout.num_workers={config.rollout.num_workers} and trainer.num_workers={config.trainer.num_workers}"
        )


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
    gpus = config.rollout.gpus_per_worker
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            "rollout.gpus_per_worker is the tensor parallel size of rollout.engine=vllm_omni, so above 1 it must be a "
            f"whole number, got {gpus:g}"
        )


def unknown_keys(values: Mapping[str, Any], schema: type[Any], prefix: str = "") -> list[str]:
    """Sentences for keys that the schema does not have (Hydra lets `+key=value` through silently)."""
    hints = get_type_hints(schema)
    known = {f.name for f in fields(schema)}
    found = []
    for key, value in values.items():
        if str(key) not in known:
            found.append(f"configuration key {prefix}{key} is unknown: " + unknown_name("it", str(key), known))
            continue
        if not isinstance(value, Mapping):
            continue
        kind = hints[str(key)]
        if isinstance(kind, type) and is_dataclass(kind):
            found.extend(unknown_keys(value, kind, f"{prefix}{key}."))
        elif get_origin(kind) is dict and isinstance(entry := get_args(kind)[1], type) and is_dataclass(entry):
            for name, inner in value.items():
                if isinstance(inner, Mapping):
                    found.extend(unknown_keys(inner, entry, f"{prefix}{key}.{name}."))
    return found


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
