"""Settings that would make a process fit a device when its weights fit but its activations do not.

`memory` calls `advice`. Each setting that is named has been planned.
"""

from collections.abc import Iterator, Sequence

from async_flowrl.config.schema import Config
from async_flowrl.memory.changes import Change
from async_flowrl.memory.devices import (
    GIB,
    MAX_SETTINGS_SHOWN,
    ROLLOUT,
    TRAINER,
    Device,
    changes,
    footprint,
    scaled,
)
from async_flowrl.memory.layout import CHECKPOINTED, CHECKPOINTING
from async_flowrl.memory.meta_model import MetaModel, build_meta_model
from async_flowrl.memory.peaks import sampling_peak, training_peak
from async_flowrl.memory.processes import Peaks

MICRO_BATCH, CHUNK = "trainer.micro_batch_size", "rollout.batch_size"
TICKETS_PER_BATCH = "rollout.tickets_per_batch"
BY_IMAGES, BY_TILES = "rollout.vae_slicing", "rollout.vae_tiling"
"""Settings after which the peak of decoding is counted again; for all others the peaks are taken as unchanged."""


def advice(title: str, config: Config, model: MetaModel, peaks: Peaks, device: Device) -> str:
    """Returns a clause with up to three settings with which the process fits, and the GiB that it would then need.

    If no single setting is enough, the clause names those that need least. `title` is a name from `memory/devices.py`.
    """
    tried: list[tuple[Change, int]] = []
    present = footprint(title, config, model, device, training=peaks.training, sampling=peaks.sampling).total
    for change in smaller(title, config, model):
        if not change.accepted(config):
            continue
        now = counted(change, config, model, peaks)
        changed = footprint(
            title,
            change.applied(config),
            scaled(change, config, model),
            device,
            training=now.training,
            sampling=now.sampling,
        )
        if changed.total >= present:
            continue
        tried.append((change, changed.total))
        if sum(size <= device.available for _, size in tried) == MAX_SETTINGS_SHOWN:
            break
    return in_words(tried, device)


def smaller(title: str, config: Config, model: MetaModel) -> Iterator[Change]:
    """Yields settings that may lower the peak of memory, those that cost the least speed or accuracy first."""
    trainer, rollout = config.trainer, config.rollout
    if title != ROLLOUT:
        more = CHECKPOINTED[CHECKPOINTED.index(trainer.gradient_checkpointing) + 1 :]
        yield from (Change(CHECKPOINTING, how) for how in more if how in ("every_2", "full"))
        if trainer.micro_batch_size > 1:
            yield Change(MICRO_BATCH, max(1, trainer.micro_batch_size // 2))
        if trainer.micro_batch_size > 3:
            yield Change(MICRO_BATCH, 1)
    if title != TRAINER and rollout.tickets_per_batch > 1:
        fewer = sorted({max(1, rollout.tickets_per_batch // 2), 1}, reverse=True)
        yield from (Change(TICKETS_PER_BATCH, tickets) for tickets in fewer)
    if title != TRAINER and (rollout.batch_size or config.images_per_ticket) > 1:
        if not rollout.vae_slicing:
            yield Change(BY_IMAGES, True)
        yield Change(CHUNK, 1)
    if title != TRAINER and not rollout.vae_tiling:
        yield Change(BY_TILES, True)
    yield from changes(title, config, model)


def counted(change: Change, config: Config, model: MetaModel, peaks: Peaks) -> Peaks:
    """Returns the peaks after a change.

    With checkpointing a new network is built, because checkpointing cannot be removed from a network.
    """
    after = change.applied(config)
    if change.key in (CHUNK, TICKETS_PER_BATCH):
        return Peaks(peaks.training, sampling_peak(after, model))
    if change.key in (BY_IMAGES, BY_TILES):
        return Peaks(peaks.training, sampling_peak(after, build_meta_model(after)))
    if change.key in (CHECKPOINTING, MICRO_BATCH):
        fresh = build_meta_model(after) if after.trainer.gradient_checkpointing != "none" else model
        return Peaks(training_peak(after, fresh), peaks.sampling)
    return peaks


def in_words(tried: Sequence[tuple[Change, int]], device: Device) -> str:
    """Returns the clause for changes and the bytes that the process would need with each."""
    fitting = [one for one in tried if one[1] <= device.available]
    shown = fitting[:MAX_SETTINGS_SHOWN] or sorted(tried, key=lambda one: one[1])[:MAX_SETTINGS_SHOWN]
    listed = ", ".join(f"{change} ({size / GIB:.3g} GiB)" for change, size in shown)
    if not listed:
        return "no single setting would make it need less"
    return f"it would fit with {listed}" if fitting else f"no single setting is enough, nearest are {listed}"
