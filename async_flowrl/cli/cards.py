"""Named GPUs (cards), and a roofline model of the seconds that a kernel, a collective and a copy take on one.

No data sheet gives the shares of peak rates that are reached, or the rates between machines: they are assumptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from async_flowrl.config.error_text import unknown_name

ALL = "all"
TENSOR_CORE_SHARE = 0.65  # Share of the bfloat16 peak that matrix products and attention reach.
FLOAT32_SHARE = 0.8  # Share of the float32 peak that matrix products in float32 reach (TF32 is off).
BANDWIDTH_SHARE = 0.85  # Share of the memory bandwidth that kernels reach.
LAUNCH_SECONDS = 4e-6  # Shortest duration of a kernel, because the host launches kernels one by one.
LINK_SHARE = 0.8  # Share of the links' rate that collectives within one machine reach.
HOST_BYTES_PER_SECOND = 50e9  # Rate between a card and pinned host memory.
NETWORK_BYTES_PER_SECOND = 40e9  # Rate between trainer and rollout workers.


def gib_of(gb: float) -> float:
    """Returns the GiB that torch finds on a card sold with `gb` GB: 79 of 80, 23.5 of 24, 15.5 of 16.

    Cards that correct errors in their memory, as L4 and A10 do, have less: 22.1 of 24.
    """
    return round(min(gb * 79 / 80, gb - 0.5), 1)


@dataclass(frozen=True)
class Card:
    """GPU by the numbers of its data sheet; a kernel takes the longest of arithmetic, memory traffic and launch."""

    name: str
    memory: float  # Bytes.
    bfloat16: float  # Dense FLOP/s of the tensor cores in bfloat16.
    float32: float  # FLOP/s of the float32 units.
    bandwidth: float  # Bytes per second of the card's memory.
    links: float  # Bytes per second to the other cards of the machine, per direction.

    @property
    def assumptions(self) -> list[str]:
        return [
            f"products and attention reach {TENSOR_CORE_SHARE:.0%} of {self.bfloat16 / 1e12:g} TFLOP/s in bfloat16 and "
            f"{FLOAT32_SHARE:.0%} of {self.float32 / 1e12:g} in float32",
            f"everything else moves its inputs and outputs once, at {BANDWIDTH_SHARE:.0%} of "
            f"{self.bandwidth / 1e12:g} TB/s; nothing is fused",
            f"a kernel takes at least {LAUNCH_SECONDS * 1e6:g} microseconds, and the host keeps up",
            f"collectives run at {LINK_SHARE:.0%} of {self.links / 1e9:g} GB/s; none is hidden behind computing",
            f"copies to the host run at {HOST_BYTES_PER_SECOND / 1e9:g} GB/s, a delivery's network at "
            f"{NETWORK_BYTES_PER_SECOND / 1e9:g} GB/s",
            "text encoders, rewards, the object store and the controller cost nothing",
        ]

    def kernel(self, flops: float, moved: int, dtype: torch.dtype | None) -> float:
        """Seconds of a kernel that moves `moved` bytes; `dtype` is its matrix products', None counts as float32."""
        on_tensor_cores = dtype is not None and dtype.itemsize < 4
        rate = self.bfloat16 * TENSOR_CORE_SHARE if on_tensor_cores else self.float32 * FLOAT32_SHARE
        return max(flops / rate, self.traffic(moved), LAUNCH_SECONDS)

    def traffic(self, moved: int) -> float:
        return moved / (self.bandwidth * BANDWIDTH_SHARE)

    def collective(self, sent: float) -> float:
        return sent / (self.links * LINK_SHARE)

    def delivery(self, size: int) -> float:
        return self.traffic(2 * size) + 2 * size / HOST_BYTES_PER_SECOND + size / NETWORK_BYTES_PER_SECOND

    def activation(self, size: int, *, from_host: bool) -> float:
        return size / HOST_BYTES_PER_SECOND if from_host else self.traffic(2 * size)


_NVLINK_3, _NVLINK_4, _NVLINK_5, _PCIE_4 = 300e9, 450e9, 900e9, 32e9
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card("A100", 80e9, 312e12, 19.5e12, 2.039e12, _NVLINK_3),
        Card("H100", 85e9, 989e12, 67e12, 3.35e12, _NVLINK_4),
        Card("H200", 150e9, 989e12, 67e12, 4.8e12, _NVLINK_4),
        Card("B200", 190e9, 2250e12, 75e12, 7.7e12, _NVLINK_5),
        Card("L40S", 47e9, 362e12, 91.6e12, 0.864e12, _PCIE_4),
        Card("RTX4090", 25.2e9, 165e12, 82.6e12, 1.008e12, _PCIE_4),
        Card("RTX3090", 25.2e9, 71e12, 35.6e12, 0.936e12, _PCIE_4),
        Card("L4", 23.7e9, 121e12, 30.3e12, 0.3e12, _PCIE_4),
    )
}


def cards_of(names: str) -> list[Card]:
    """Returns the cards of names with commas, or of `all`. ValueError, with the nearest name, for an unknown one."""
    requested = list(CARDS) if names.lower() == ALL else [name.strip().upper() for name in names.split(",")]
    if unknown := [name for name in requested if name not in CARDS]:
        raise ValueError(unknown_name("--card", unknown[0], [*CARDS, ALL]))
    return [CARDS[name] for name in requested]
