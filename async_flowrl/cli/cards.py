"""Named GPUs (cards), and a roofline model of the seconds that a kernel, a collective and a copy take on one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from async_flowrl.config.messages import unknown_name


@dataclass(frozen=True)
class Card:
    """GPU by the numbers of its data sheet."""

    name: str
    memory: float  # Bytes.
    bfloat16: float  # Dense FLOP/s of the tensor cores in bfloat16.
    float32: float  # FLOP/s of the float32 units.
    bandwidth: float  # Bytes per second of the card's memory.
    links: float  # Bytes per second to the other cards of the machine, per direction.


GIB_OF_GB = 79 / 80  # GiB that torch finds on a card, per GB in its name: 79 of 80, 23.7 of 24.
ALL = "all"
_NVLINK_3, _NVLINK_4, _NVLINK_5, _PCIE_4 = 300e9, 450e9, 900e9, 32e9
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card("A100", 80e9, 312e12, 19.5e12, 2.039e12, _NVLINK_3),
        Card("H100", 85e9, 989e12, 67e12, 3.35e12, _NVLINK_4),
        Card("H200", 150e9, 989e12, 67e12, 4.8e12, _NVLINK_4),
        Card("B200", 190e9, 2250e12, 75e12, 7.7e12, _NVLINK_5),
        Card("L40S", 47e9, 362e12, 91.6e12, 0.864e12, _PCIE_4),
        Card("L4", 24e9, 121e12, 30.3e12, 0.3e12, _PCIE_4),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that no data sheet gives: reached shares of the peak rates, and rates between machines."""

    tensor_core_share: float = 0.65  # Share of the bfloat16 peak that matrix products and attention reach.
    float32_share: float = 0.8  # Share of the float32 peak that matrix products in float32 reach (TF32 is off).
    bandwidth_share: float = 0.85  # Share of the memory bandwidth that kernels reach.
    launch_seconds: float = 4e-6  # Shortest duration of a kernel, because the host launches kernels one by one.
    link_share: float = 0.8  # Share of the links' rate that collectives within one machine reach.
    host_bytes_per_second: float = 50e9  # Rate between a card and pinned host memory.
    network_bytes_per_second: float = 40e9  # Rate between trainer and rollout workers.

    def sentences(self, card: Card) -> list[str]:
        """Returns the assumptions of an estimate on `card` in words."""
        return [
            f"products and attention reach {self.tensor_core_share:.0%} of {card.bfloat16 / 1e12:g} TFLOP/s in bfloat16"
            f" and {self.float32_share:.0%} of {card.float32 / 1e12:g} in float32",
            f"everything else moves its inputs and outputs once, at {self.bandwidth_share:.0%} of "
            f"{card.bandwidth / 1e12:g} TB/s; nothing is fused",
            f"a kernel takes at least {self.launch_seconds * 1e6:g} microseconds, and the host keeps up",
            f"collectives run at {self.link_share:.0%} of {card.links / 1e9:g} GB/s; none is hidden behind computing",
            f"copies to the host run at {self.host_bytes_per_second / 1e9:g} GB/s, a delivery's network at "
            f"{self.network_bytes_per_second / 1e9:g} GB/s",
            "text encoders, rewards, the object store and the controller cost nothing",
        ]


@dataclass(frozen=True)
class Roofline:
    """Roofline model: a kernel takes the larger of its time for arithmetic and its time for memory traffic."""

    card: Card
    assumptions: Assumptions = Assumptions()

    def kernel(self, flops: float, moved: int, dtype: torch.dtype | None) -> float:
        """Returns the seconds of a kernel; `moved`: bytes read and written; `dtype`: that of its matrix products."""
        return max(self.arithmetic(flops, dtype), self.traffic(moved), self.assumptions.launch_seconds)

    def is_arithmetic(self, flops: float, moved: int, dtype: torch.dtype | None) -> bool:
        """Returns whether arithmetic takes at least as long as memory traffic and the launch."""
        return flops > 0 and self.arithmetic(flops, dtype) >= self.kernel(flops, moved, dtype)

    def arithmetic(self, flops: float, dtype: torch.dtype | None) -> float:
        """Returns the seconds of `flops`; dtypes of less than 32 bits run on tensor cores, None as float32."""
        if dtype is not None and dtype.itemsize < 4:
            return flops / (self.card.bfloat16 * self.assumptions.tensor_core_share)
        return flops / (self.card.float32 * self.assumptions.float32_share)

    def traffic(self, moved: int) -> float:
        """Returns the seconds to read and write `moved` bytes of the card's memory."""
        return moved / (self.card.bandwidth * self.assumptions.bandwidth_share)

    def collective(self, sent: float) -> float:
        """Returns the seconds of collectives in which this rank sends `sent` bytes."""
        return sent / (self.card.links * self.assumptions.link_share)

    def delivery(self, size: int, share: int | None = None) -> float:
        """Returns the seconds to stage, send and receive a version of `size` bytes."""
        # `share` are the bytes that each rank sends if the ranks share the weights. They send them in buckets, so that
        # the copies to and from the hosts go on beside the network.
        assumptions = self.assumptions
        if share is not None and share < size:
            slower = min(assumptions.host_bytes_per_second, assumptions.network_bytes_per_second)
            return self.traffic(2 * share) + size / slower
        return (
            self.traffic(2 * size)
            + 2 * size / assumptions.host_bytes_per_second
            + size / assumptions.network_bytes_per_second
        )

    def activation(self, size: int, *, from_host: bool) -> float:
        """Returns the seconds to put a version of `size` bytes into a network, from host memory or within the card."""
        return size / self.assumptions.host_bytes_per_second if from_host else self.traffic(2 * size)


def cards_of(names: str) -> list[Card]:
    """Returns the cards of names with commas, or of `all`. ValueError, with the nearest name, for an unknown one."""
    if names.lower() == ALL:
        return list(CARDS.values())
    by_name, requested = (
        {name.upper(): card for name, card in CARDS.items()},
        [name.strip() for name in names.split(",")],
    )
    for name in requested:
        if name.upper() not in by_name:
            raise ValueError(unknown_name("--card", name, [*CARDS, ALL] if len(requested) == 1 else CARDS))
    return [by_name[name.upper()] for name in requested]
