"""The cheapest layout of the trainer that fits into given devices by the memory plan; layout.py asks for it."""

from collections.abc import Mapping

from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import Config
from async_flowrl.plan.devices import GIB, MEMORY_WARNING_SHARE, ROLLOUT, TRAINER, Device, footprint, titled_devices
from async_flowrl.plan.layout import candidates, with_layout
from async_flowrl.plan.meta_model import build_meta_model
from async_flowrl.plan.peaks import remembered_training_peak, sampling_peak
from async_flowrl.training.messages import Layout


def fitting(config: Config, memory: Mapping[str, int]) -> tuple[Layout, str]:
    """Tries the candidates in order and returns the first that fits, else the one that needs least memory, and why.

    `memory` is pool → bytes of its smallest device. A layout fits if its planned memory, activations included, is at
    most MEMORY_WARNING_SHARE of the device. Raises the errors of the planner.
    """
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
            peaks[how] = remembered_training_peak(now)
        whole = footprint(title, now, model, device, training=peaks.get(how, 0), sampling=sampling)
        total = whole.total if held <= device.available else max(held, whole.total)
        tried.append((layout, total))
        if held <= device.available and total <= MEMORY_WARNING_SHARE * device.available:
            break
    # Activations are not counted if the weights alone do not fit, so totals may be equal; the last of them is then
    # taken, because it checkpoints most.
    least = min(reversed(tried), key=lambda one: one[1])
    layout, total = tried[-1] if tried[-1][1] <= MEMORY_WARNING_SHARE * device.available else least
    return layout, _why(title, tried, layout, total, device)


def _why(title: str, tried: list[tuple[Layout, int]], layout: Layout, total: int, device: Device) -> str:
    """Returns in words the planned memory of the chosen layout, and of the next cheaper one, which does not fit."""
    needs = f"{title} is planned to need {total / GIB:.3g} of {device.available / GIB:.3g} GiB, activations included"
    dearer = [one for one in tried if one[0] != layout]
    if total > MEMORY_WARNING_SHARE * device.available:
        return f"nothing fits; with this, {needs}"
    if not dearer:
        return f"the cheapest fits: {needs}"
    before, size = dearer[-1]
    return f"{needs}; with {before.in_words()} it would be {size / GIB:.3g}"
