"""Checks of a whole configuration before anything is started: the rule of each field, and conflicts between fields.

Every error message is one sentence.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from async_flowrl.config.error_text import as_written, did_you_mean, unknown_name
from async_flowrl.config.models import is_toy
from async_flowrl.config.resolution import configured, in_pixels, pixels
from async_flowrl.config.schema import FULL, LORA, SHARED, Config
from async_flowrl.config.scoring_pools import scoring_pools, section_of
from async_flowrl.config.settings import settings


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one sentence for its author."""


# What a real model is trained with: images of at least so many pixels, a learning rate (by whether all weights are
# trained) and a clip_range of at most so much.
LEAST_PIXELS, FASTEST, WIDEST_CLIP = 256 * 256, {False: 1e-3, True: 1e-4}, 1e-2
# Mode → the `max_staleness` that it stands for, in words.
MEANT_STALENESS = {"sync": "0", "stream": "0", "one_step_off": "1", "fully_async": "2 or more"}


def check(config: Config) -> None:
    """Raises ConfigError for values or combinations that cannot work on any machine."""
    check_fields(config)
    placement = (_placement, _shared, _node, _elastic, _devices)
    parts = (_mode, _sizes, *placement, _trainer, _tune, _quantize, _reward_pools, _group_setup, _environment, _engine)
    if refusal := next(chain.from_iterable(part(config) for part in parts), None):
        raise ConfigError(refusal)


def check_fields(section: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first field that breaks its rule; `prefix` is the section's key with a dot."""
    for key, value, rule in settings(section, prefix):
        if value is None:
            continue
        if rule.choices and value not in rule.choices:
            raise ConfigError(unknown_name(key, str(value), rule.choices))
        if allowed := rule.refusal(value):
            raise ConfigError(f"{key} must be {allowed}, got {value}")


def _mode(config: Config) -> Iterator[str]:
    mode = config.mode
    if mode is None or mode == config.mode_name:
        return
    other = f"; --config-name {mode} sets it, and mode=null allows every setting"
    if (staleness := MEANT_STALENESS[mode]) != MEANT_STALENESS[config.mode_name]:
        yield f"mode={mode} means max_staleness={staleness}, got {config.max_staleness}{other}"
    yield f"mode={mode} means hand_over={'batch' if mode == 'sync' else 'stream'}, got {config.hand_over}{other}"


def _sizes(config: Config) -> Iterator[str]:
    try:
        configured(config.rollout)
    except ValueError as error:
        yield str(error)
    if config.group_size % config.images_per_ticket:
        yield f"ticket_size={config.ticket_size} must divide group_size={config.group_size}"
    scales = {"rollout.true_cfg_scale": config.rollout.true_cfg_scale}
    scales["algorithm.reference_cfg_scale"] = config.algorithm.reference_cfg_scale or 0.0
    yield from filter(None, (guidance_refusal(key, scale) for key, scale in scales.items()))
    if config.rollout.true_cfg_scale <= 1 and (second := config.rollout.true_cfg_scale_2) is not None:
        yield f"rollout.true_cfg_scale_2={second:g} needs rollout.true_cfg_scale above 1, which turns guidance on"


def _placement(config: Config) -> Iterator[str]:
    if config.runtime.in_threads and (ranks := config.trainer.num_workers) > 1:
        yield f"runtime.backend=local has one process, which holds one trainer rank, got trainer.num_workers={ranks}"
    if config.runtime.in_threads and config.runtime.numa_binding:
        yield "runtime.numa_binding=true binds processes, and local workers are threads of one: use runtime.backend=ray"


def _devices(config: Config) -> Iterator[str]:
    gpus, ranks = config.trainer.gpus_per_worker, config.trainer.num_workers
    if ranks > 1 and may_share(gpus, gpus):
        yield (
            f"trainer.gpus_per_worker={gpus:g} lets two of the {ranks} trainer ranks share a device, where NCCL cannot "
            "connect them: ask for more than half a GPU each, or for none"
        )
    transport, obstacle = config.checkpoint_engine.transport, nccl_obstacle(config)
    if config.in_shares:
        obstacle = "with tune=full and trainer.shard=full the first rank sends from host memory"
    if transport in ("nccl", "pynccl") and obstacle:
        yield (
            f"checkpoint_engine.transport={transport} needs a GPU of its own for the trainer and for every rollout "
            f"worker, but {obstacle}: use gloo, object_store or auto"
        )


def _trainer(config: Config) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    if trainer.cpu_offload and trainer.holds_all:
        yield "trainer.cpu_offload=true is FSDP2's, which shards the base: set trainer.shard to full or auto, got none"
    spread = [("trainer", "a trainer rank", trainer.gpus_per_worker)]
    if rollout.engine != "vllm_omni":
        spread.append(("rollout", f"a rollout worker with rollout.engine={rollout.engine}", rollout.gpus_per_worker))
    for pool, what, gpus in spread:
        if gpus > 1:
            yield (
                f"{pool}.gpus_per_worker={gpus:g}, but {what} computes on one GPU and would leave the others idle: use "
                f"more {pool}.num_workers"
            )


def _tune(config: Config) -> Iterator[str]:
    if config.tune == LORA:
        if config.full.freeze:
            yield f"full.freeze={config.full.freeze} is for tune=full; tune=lora freezes the whole base model"
        return
    trainer = config.trainer
    if config.lora.path is not None:
        yield (
            f"lora.path={config.lora.path} is for tune=lora: to start tune=full at a LoRA, write it into a model's "
            "weights (async-flowrl export … --merged) and give that folder as model.path"
        )
    if config.algorithm.teachers:
        yield f"algorithm.teachers={list(config.algorithm.teachers)} are LoRAs, so they need tune=lora, got tune=full"
    if trainer.is_hybrid:
        yield "tune=full needs trainer.shard=none (each rank holds all) or full; trainer.shard=hybrid is for tune=lora"
    if trainer.cpu_offload:
        yield "trainer.cpu_offload=true offloads a frozen base, and tune=full has none: set it to false"
    if config.rollout.engine != "diffusers":
        yield f"tune=full needs rollout.engine=diffusers, which alone takes whole weights, got {config.rollout.engine}"


def _quantize(config: Config) -> Iterator[str]:
    model, trainer = config.model, config.trainer
    base, text = (f"model.{key}={getattr(model, key)}" for key in ("quantize", "quantize_text_encoder"))
    if model.quantize is not None:
        if config.tune == FULL:
            yield f"{base} is for a frozen base, and tune=full trains it: use tune=lora"
        if trainer.shard not in ("auto", "none") or trainer.cpu_offload:
            value = "trainer.cpu_offload=true" if trainer.cpu_offload else f"trainer.shard={trainer.shard}"
            yield f"{base} needs trainer.shard=none or auto, with which each rank holds the whole base, got {value}"
    for setting, stored in ((base, model.quantize), (text, model.quantize_text_encoder)):
        if stored is not None and config.rollout.engine == "vllm_omni":
            yield f"{setting} needs rollout.engine=diffusers: vllm_omni cannot load the same bits"
    if model.quantize_text_encoder is not None and model.weights == "random":
        yield f"{text} needs model.weights=files: random models have no text encoders"


def _reward_pools(config: Config) -> Iterator[str]:
    if config.reward.terms and not any(term.weight for term in config.reward.terms.values()):
        yield f"reward.terms: the weight of {' and '.join(config.reward.terms)} is 0, so nothing would be trained"
    for pool in scoring_pools(config):
        gpus = pool.gpus_per_worker
        if gpus > 1 and gpus != int(gpus):
            yield f"{section_of(pool.name)}.gpus_per_worker above 1 must be a whole number of GPUs, got {gpus:g}"


def _group_setup(config: Config) -> Iterator[str]:
    # It runs on the lane (worker thread) that publishes, so calls that wait for it are limited by that deadline.
    _, members = config.rollout.worker_bounds
    if members > config.checkpoint_engine.max_members:
        members //= config.rollout.workers_per_node or 1  # One of each node.
    seconds = config.checkpoint_engine.setup_seconds + 0.1 * (members + 1)
    transport = config.checkpoint_engine.transport
    if transport == "object_store" or (transport == "auto" and nccl_obstacle(config)):
        return
    if seconds >= config.deadlines.publish:
        yield (
            f"deadlines.publish={config.deadlines.publish:g} leaves no time beside making a group of "
            f"{members} rollout workers, which may take {seconds:g} s by "
            "checkpoint_engine.setup_seconds: give it more, or the group less"
        )


def _environment(config: Config) -> Iterator[str]:
    for pool in ("rollout", "trainer", "reward"):
        key, environment = f"{pool}.environment", getattr(config, pool).environment
        yield from filter(None, [environment_refusal(key, environment, config.runtime.backend)])


def _engine(config: Config) -> Iterator[str]:
    if config.rollout.engine != "vllm_omni":
        return
    if config.runtime.in_threads:
        yield "rollout.engine=vllm_omni needs a process for each worker (runtime.backend=ray), got local"
    if config.model.weights != "files":
        yield "rollout.engine=vllm_omni reads a model's files, so it needs model.weights=files, got random"
    if config.placement == SHARED:
        yield "rollout.engine=vllm_omni keeps its device for itself, so it needs placement=separate, got shared"
    if config.rollout.compile:
        yield "rollout.compile=true is for rollout.engine=diffusers: the adapters of vllm_omni break compiled graphs"
    if config.rollout.text_encoder == "cached":
        yield "rollout.text_encoder=cached is for rollout.engine=diffusers: use offload with vllm_omni"
    gpus = config.rollout.gpus_per_worker
    if gpus > 1 and gpus != int(gpus):
        size = "the tensor parallel size of rollout.engine=vllm_omni"
        yield f"rollout.gpus_per_worker above 1, {size}, must be a whole number, got {gpus:g}"


def section_or_null(kind: Any) -> Any:
    """Returns the dataclass of a field that may also be None; any other type is returned unchanged."""
    return next((part for part in get_args(kind) if is_dataclass(part) and type(None) in get_args(kind)), kind)


def toy_values(config: Config) -> str | None:
    if is_toy(config.model.path):
        return None
    trainer, algorithm, fastest = config.trainer, config.algorithm, FASTEST[config.tune == FULL]
    values = [f"images of {in_pixels(size)}" for size in configured(config.rollout) if pixels(size) < LEAST_PIXELS]
    if trainer.learning_rate > fastest:
        values.append(f"trainer.learning_rate={trainer.learning_rate:g}")
    if algorithm.clip_unit == "mean" and algorithm.clip_range > WIDEST_CLIP:
        values.append(f"algorithm.clip_range={algorithm.clip_range:g}")
    sentence = f"{', '.join(values)}: what suits tiny models alone, and model.path={config.model.path} is a real one"
    return sentence if values else None


def unknown_keys(values: Mapping[str, Any], schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Yields a sentence for every key that the schema lacks; Hydra accepts `+key=value` for any key."""
    hints = get_type_hints(schema)
    names = {f.name for f in fields(schema)}
    for key, value in values.items():
        if str(key) not in names:
            yield removed(f"{prefix}{key}") or _unknown(prefix, str(key), value, names)
            continue
        if not isinstance(value, Mapping):
            continue
        kind = section_or_null(hints[str(key)])
        if isinstance(kind, type) and is_dataclass(kind):
            yield from unknown_keys(value, kind, f"{prefix}{key}.")
        elif get_origin(kind) is dict and isinstance(entry := get_args(kind)[1], type) and is_dataclass(entry):
            for name, inner in value.items():
                if isinstance(inner, Mapping):
                    yield from unknown_keys(inner, entry, f"{prefix}{key}.{name}.")


def _unknown(prefix: str, name: str, value: Any, names: set[str]) -> str:
    full, first = f"{prefix}{name}", name
    near = did_you_mean(name, names)
    misspelt_section = isinstance(value, Mapping) and near
    while isinstance(value, Mapping) and value:
        name, value = next((str(key), inner) for key, inner in value.items())
        full += f".{name}"
    elsewhere = {key: others.split() for key, others in names_elsewhere().items()}
    matches = [key for key, others in elsewhere.items() if f".{full}".endswith(tuple(f".{other}" for other in others))]
    # Or what it stands in has a name elsewhere, as in config.reward_fn.ocr; names that users chose do not count.
    foreign = set(full.removeprefix(prefix).split("."))
    matches = matches or [key for key, others in elsewhere.items() if foreign & set(others)]
    if any(name in others for others in elsewhere.values()) or not (matches or misspelt_section):
        matches += [key for key in all_keys() if key.rpartition(".")[2] == name and key not in matches]
    if matches:
        return f"configuration key {full} is unknown: here it is {' or '.join(matches)}"
    unknown = f"configuration key {full} is unknown: it must be one of {', '.join(sorted(names))}"
    return f"{unknown}, got {first!r}{near or did_you_mean(name, all_keys())}"


def names_elsewhere() -> dict[str, str]:
    """Returns configuration key → its names in other projects, with blanks between them."""
    path = Path(__file__).with_name("names_elsewhere.yaml")
    return dict(line.split(": ") for line in path.read_text(encoding="utf-8").splitlines()[1:])


def all_keys(schema: type[Any] = Config, prefix: str = "") -> Iterator[str]:
    """Yields every key of the schema, sections before their own."""
    for name, hint in get_type_hints(schema).items():
        yield f"{prefix}{name}"
        if isinstance(kind := section_or_null(hint), type) and is_dataclass(kind):
            yield from all_keys(kind, f"{prefix}{name}.")


# Configuration keys that are gone. Key (* is any name), or section with all its keys → what to do instead.
REMOVED: Mapping[str, str] = {
    "debug": "tests and benchmarks give a run other worker classes (benchmarks/disturbed.py)",
    "limits.successors": "all trainer ranks are started again when one dies; limits.recoveries says how often",
    "preflight": "a run checks its nodes before it loads models, and so does async-flowrl doctor",
    "*reward.terms.*.serve.hung_calls": "a server hangs if its health path gives no 200 for serve.hung_seconds",
    "*reward.terms.*.serve.requirements": "begin command with uv run --isolated --no-project --with-requirements FILE",
}


def removed(key: str) -> str | None:
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    hints = ((name, hint) for name in names for pattern, hint in REMOVED.items() if fnmatchcase(name, pattern))
    return next((f"configuration key {name} is gone: {hint}" for name, hint in hints), None)


ONE_MACHINE = (
    "and without runtime.address the run has this machine alone: start Ray on the nodes and say runtime.address=auto"
)
# Settings that must be equal for trainer and rollout, because a process belongs to both pools.
SAME = ("num_workers", "workers_per_node", "gpus_per_worker", "threads")


def _shared(config: Config) -> Iterator[str]:
    if config.placement != SHARED:
        return
    trainer, rollout = config.trainer, config.rollout
    for key in SAME:
        one, other = getattr(trainer, key), getattr(rollout, key)
        if one != other:
            yield (
                f"placement=shared has each process be a trainer rank and a rollout worker, so trainer.{key} and "
                f"rollout.{key} must be equal, got {as_written(one)} and {as_written(other)}"
            )
    for name in sorted(trainer.environment.keys() & rollout.environment.keys()):
        if trainer.environment[name] != rollout.environment[name]:
            yield (
                f"placement=shared has one process for both pools, and {name} is {trainer.environment[name]} in "
                f"trainer.environment, {rollout.environment[name]} in rollout.environment"
            )
    if trainer.shard not in ("auto", "none") or trainer.cpu_offload:
        value = "trainer.cpu_offload=true" if trainer.cpu_offload else f"trainer.shard={trainer.shard}"
        yield (
            "placement=shared samples with the base that it trains on, so each process holds all of it: "
            f"trainer.shard must be none or auto without trainer.cpu_offload, got {value}"
        )
    if rollout.elastic:
        yield (
            "placement=shared has as many rollout workers as trainer ranks all the time: leave rollout.min_workers and "
            "rollout.max_workers out"
        )
    if (transport := config.checkpoint_engine.transport) not in ("object_store", "auto"):
        must = "checkpoint_engine.transport must be object_store or auto"
        yield f"placement=shared sends no versions, as each worker makes them itself: {must}, got {transport}"


def sharing_refusal(config: Config, workers: int) -> str | None:
    """Returns the sentence with which `placement=shared` would be refused on `workers` processes; else None."""
    # Settings that must be equal for both pools do not count, because whoever takes the advice sets them.
    trainer = replace(config.trainer, num_workers=workers, workers_per_node=None)
    rollout = replace(config.rollout, **{key: getattr(trainer, key) for key in SAME})
    try:
        check(replace(config, placement=SHARED, trainer=trainer, rollout=rollout))
    except ConfigError as error:
        return str(error)
    return None


def _node(config: Config) -> Iterator[str]:
    for pool, section in (("trainer", config.trainer), ("rollout", config.rollout)):
        per_node, workers = section.workers_per_node, section.num_workers
        if per_node is None:
            continue
        setting = f"{pool}.workers_per_node={per_node}"
        if config.runtime.in_threads:
            yield f"{setting} places processes on nodes, and runtime.backend=local has threads of one process"
        if workers % per_node:
            least, most = max(1, workers // per_node) * per_node, -(-workers // per_node) * per_node
            near = f"{least}" if least == most else f"{least} or {most}"
            yield f"{setting} must divide {pool}.num_workers={workers}: with as many on every node, {near} workers fit"
        if config.runtime.address is None and per_node < workers:
            yield f"{setting} with {pool}.num_workers={workers} asks for {workers // per_node} nodes, {ONE_MACHINE}"
    trainer = config.trainer
    size, per_node = trainer.shard_size, trainer.workers_per_node
    if trainer.is_hybrid and size and per_node and per_node % size:
        yield (
            f"trainer.shard_size={size} must divide trainer.workers_per_node={per_node}: ranks that hold the base "
            "between them would sit on two nodes"
        )


def _elastic(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.elastic:
        return
    (least, most), workers = rollout.worker_bounds, rollout.num_workers
    key = "min_workers" if rollout.max_workers is None else "max_workers"
    setting = f"rollout.{key}={getattr(rollout, key)}"
    if least > most:
        yield f"rollout.min_workers={least} must be at most rollout.max_workers={most}"
    if least > workers:
        yield f"rollout.min_workers={least} must be at most rollout.num_workers={workers}, the planned size"
    if most < workers:
        yield f"rollout.max_workers={most} must be at least rollout.num_workers={workers}, the planned size"
    if config.runtime.in_threads:
        yield f"{setting} follows the nodes of a cluster, and runtime.backend=local has threads of one process"
    if config.runtime.address is None:
        yield f"{setting} follows the nodes of a cluster, {ONE_MACHINE}"
    if (per_node := rollout.workers_per_node) is not None:
        yield f"{setting} adds single workers, rollout.workers_per_node={per_node} whole nodes: leave one of them out"


def nccl_obstacle(config: Config) -> str | None:
    """Returns why NCCL cannot carry weights from the trainer to the rollout workers; None if nothing prevents it."""
    # The rank that sends and every rollout worker need a GPU each, all of them different, because NCCL refuses a group
    # in which two processes use the same one ("Duplicate GPU detected"). Whether NCCL is installed is checked
    # elsewhere.
    trainer, rollout = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker
    if config.runtime.in_threads:
        return "runtime.backend=local has all workers in one process"
    if config.placement == SHARED:
        return "with placement=shared no weights are sent: each worker trains the weights that it samples with"
    if config.versions_on_host:
        return "rollout workers keep their versions in host memory (rollout.versions_on)"
    if config.trainer.versions_on == "host":
        return "trainer ranks keep their versions in host memory (trainer.versions_on)"
    if config.rollout.engine == "vllm_omni":
        return "rollout.engine=vllm_omni receives weights in host memory"
    for key, gpus in (("trainer.gpus_per_worker", trainer), ("rollout.gpus_per_worker", rollout)):
        if gpus == 0:
            return f"{key}=0 leaves its workers on the CPU"
    if may_share(trainer, rollout):
        return f"trainer.gpus_per_worker={trainer:g} and rollout.gpus_per_worker={rollout:g} fit on one device"
    if config.rollout.worker_bounds[1] > 1 and may_share(rollout, rollout):
        return f"rollout.gpus_per_worker={rollout:g} lets several rollout workers share a device"
    return None


def may_share(one: float, other: float) -> bool:
    """Returns True if two workers with these `gpus_per_worker` fit on one GPU; a share of 0 is a worker on the CPU."""
    return min(one, other) > 0 and one + other <= 1 + 1e-9


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED")
_MALLOC = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_CACHE = ("HF_HOME", "HF_HUB_CACHE")
# Variable that a configuration must not set → the reason.
RESERVED: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "each worker is shown the GPUs of its seat (gpus_per_worker)",
    "CUBLAS_WORKSPACE_CONFIG": "it follows from deterministic",
    **dict.fromkeys(_THREADS, "it follows from the pool's threads"),
    **dict.fromkeys(_RANKS, "trainer ranks get it when they meet"),
    **dict.fromkeys(
        (*_START, *_MALLOC), "it is read when a process starts, before it could be set: export it where Ray is started"
    ),
    **dict.fromkeys(_CACHE, "all pools of a node share one cache of the hub: export it where Ray is started"),
}


def environment_refusal(key: str, environment: Mapping[str, str], backend: str) -> str | None:
    """Returns one sentence about what is wrong with a pool's environment, the setting `key`; None if nothing is."""
    if environment and backend == "local":
        names = f"{', '.join(environment)} with runtime.backend=local"
        return f"{key} is for workers that are processes, got {names}, whose workers are threads: export it instead"
    for name, value in environment.items():
        if not name or set(name) & {"=", "\0"}:
            return f"{key} has no name of an environment variable: {name!r}"
        if name in RESERVED:
            return f"{key} cannot set {name}: {RESERVED[name]}"
        if value in ("True", "False"):
            return f"{key}.{name} must be text, got {value}: write '1' or '{value.lower()}', in quotes"
    return None


def guidance_refusal(key: str, scale: float, *, embedded: bool = False) -> str | None:
    """Returns one sentence if the setting or option `key` cannot have the value `scale`; None if it can.

    `embedded`: the model takes the scale as an input of its network. Else the guidance is classifier-free, and a scale
    between 0 and 1 would weaken the prompt; the network is then called without guidance instead.
    """
    if embedded:
        allowed, values = 0 < scale < math.inf, "above 0 for a model that takes guidance as an input"
    else:
        allowed, values = scale == 0 or 1 <= scale < math.inf, "above 1, or 0 or 1 for no guidance"
    return None if allowed else f"{key} must be {values}, got {scale:g}"
