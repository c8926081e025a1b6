"""The choice of `trainer.shard=auto` and `trainer.gradient_checkpointing=auto` on given devices, with its reason.

Plan, rehearsal, doctor and run all ask `resolved`, so what a plan counts is what a run does. The choice changes no bit
of the weights where the kernels are deterministic, but with tune=full that of `shard` does.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import FULL, Config
from async_flowrl.config.shared import SHARED
from async_flowrl.plan.devices import GIB, ROLLOUT, TIGHT, TRAINER, Device, footprint, titled_devices
from async_flowrl.plan.memory import sampling_peak, training_peak
from async_flowrl.plan.meta_model import MetaModel, build_meta_model
from async_flowrl.training.messages import Layout

logger = logging.getLogger(__name__)

AUTO = "auto"
CHECKPOINTED = ("none", "every_4", "every_3", "every_2", "full")
"""Values of `trainer.gradient_checkpointing`, from the one that needs most memory to the one that needs least."""
SHARD, CHECKPOINTING = "trainer.shard", "trainer.gradient_checkpointing"


@dataclass(frozen=True)
class Chosen:
    """A layout of the trainer, and a sentence on what `auto` is in it and why, where it was asked for."""

    layout: Layout
    reasons: tuple[str, ...]

    def applied(self, config: Config) -> Config:
        return with_layout(config, self.layout)


def with_layout(config: Config, layout: Layout) -> Config:
    """A copy of the configuration with a layout in place of `auto`."""
    return replace(config, trainer=layout.applied(config.trainer))


def resolved(config: Config, memory: Mapping[str, int]) -> Chosen:
    """The layout that the configuration names or, for `auto`, the cheapest that fits; `memory` is pool → bytes of its
    smallest device, without an entry where a pool has none.

    Cheapest first: each rank holds all of the base (nothing to gather, and a rank's death costs one step's share of
    its work) and checkpoints as few blocks as fit; then the ranks share it. Where nothing fits, what needs least. A
    model that cannot be planned is named in the reasons; its layout is the one that needs least.
    """
    asked = _asked(config)
    if not asked:
        return Chosen(Layout.named(config.trainer), ())
    if "trainer" not in memory:
        return _chosen(_filled(config, "none", "none"), asked, "the trainer has no GPU whose memory it could save")
    try:
        return _planned(config, memory, asked)
    except Exception as error:  # whatever a planner has against a model, the run may start
        logger.info("no plan of the trainer's layout", exc_info=True)
        why = f"the model cannot be planned ({type(error).__name__}: {error}), and this needs least memory"
        return _chosen(_filled(config, _shared(config), "full"), asked, why)


def on_devices(config: Config, device_bytes: int) -> dict[str, int]:
    """Pool → bytes of its devices, for the pools that have any by the configuration."""
    asked = {"trainer": config.trainer.gpus_per_worker, "rollout": config.rollout.gpus_per_worker}
    return {pool: device_bytes for pool, gpus in asked.items() if gpus > 0}


def _asked(config: Config) -> list[str]:
    """The keys that are `auto` and decide something."""
    trainer = config.trainer
    free = trainer.num_workers > 1 and not trainer.cpu_offload and config.placement != SHARED
    found = [SHARD] if trainer.shard == AUTO and free else []
    return found + ([CHECKPOINTING] if trainer.gradient_checkpointing == AUTO else [])


def candidates(config: Config) -> Iterator[Layout]:
    """Layouts in the order in which they are tried, cheapest first."""
    asked = _asked(config)
    for shard in ("none", _shared(config)) if SHARD in asked else ("",):
        for how in CHECKPOINTED if CHECKPOINTING in asked else ("",):
            yield _filled(config, shard, how)


def _planned(config: Config, memory: Mapping[str, int], asked: list[str]) -> Chosen:
    pools = {pool: size for pool, size in memory.items() if not is_scoring_pool(pool)}
    devices = {title: device for title, device in titled_devices(config, pools).items() if title != ROLLOUT}
    ((title, device),) = devices.items()
    model = build_meta_model(config)
    sampling = sampling_peak(config, model) if title != TRAINER else 0
    peaks: dict[str, int] = {}
    tried: list[tuple[Layout, int]] = []
    for layout in candidates(config):
        now, how = with_layout(config, layout), layout.gradient_checkpointing
        held = footprint(title, now, model, device).resident
        if held <= device.available and how not in peaks:
            # Checkpointing cannot be removed from a network, so each way takes a new one.
            peaks[how] = _peak(now, model if how == "none" else build_meta_model(now))
        whole = footprint(title, now, model, device, training=peaks.get(how, 0), sampling=sampling)
        total = whole.total if held <= device.available else max(held, whole.total)
        tried.append((layout, total))
        if held <= device.available and total <= TIGHT * device.available:
            break
    # Of several that need the same, the last: activations are not counted where the weights alone do not fit.
    least = min(reversed(tried), key=lambda one: one[1])
    layout, total = tried[-1] if tried[-1][1] <= TIGHT * device.available else least
    return _chosen(layout, asked, _why(title, tried, layout, total, device))


def _peak(config: Config, model: MetaModel) -> int:
    """Of training, after sampling has made what a network makes once and keeps, as in a plan of both."""
    sampling_peak(config, model)
    return training_peak(config, model)


def _why(title: str, tried: list[tuple[Layout, int]], layout: Layout, total: int, device: Device) -> str:
    """What the layout needs, and what the one before it would have."""
    needs = f"{title} is planned to need {total / GIB:.3g} of {device.available / GIB:.3g} GiB, activations included"
    dearer = [one for one in tried if one[0] != layout]
    if total > TIGHT * device.available:
        return f"nothing fits; with this, {needs}"
    if not dearer:
        return f"the cheapest fits: {needs}"
    before, size = dearer[-1]
    return f"{needs}; with {before.in_words()} it would be {size / GIB:.3g}"


def _chosen(layout: Layout, asked: list[str], why: str) -> Chosen:
    values = {SHARD: layout.in_shard(), CHECKPOINTING: layout.gradient_checkpointing}
    return Chosen(layout, (f"{' and '.join(f'{key}=auto is {values[key]}' for key in asked)}: {why}",))


def _shared(config: Config) -> str:
    """How ranks share the base where they must: those of a node between them, where it is known how many these are."""
    per_node = config.trainer.workers_per_node if config.tune != FULL else None
    return "hybrid" if per_node is not None and 1 < per_node < config.trainer.num_workers else "full"


def _filled(config: Config, shard: str, how: str) -> Layout:
    """The configuration's layout with these in place of an `auto` that decides something."""
    layout, asked = Layout.named(config.trainer), _asked(config)
    if SHARD in asked:
        size = config.trainer.workers_per_node if shard == "hybrid" else layout.shard_size
        layout = replace(layout, shard=shard, shard_size=size)
    return replace(layout, gradient_checkpointing=how) if CHECKPOINTING in asked else layout
