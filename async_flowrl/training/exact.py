"""The exact sum of gradients: its bits do not depend on the order of the additions or on the number of ranks.

Addition of floats depends on the order, addition of integers does not. Each contribution (the gradient of one part of a
group) is therefore rounded once to multiples of 2^exponent and added as int64. The sums of the ranks are added as
int64, too, and the total is converted to float32 once. The first exponent is -50: values of at least 2^-27 are then
exact, smaller ones change by at most 2^-51, and sums may reach 2^12. All tensors have the same exponent.

An int64 sum must not overflow, and the check must not depend on which rank added what. So the largest magnitudes of all
contributions of all ranks are added exactly, and only that number decides: if the sum could reach 2^62 multiples, the
whole optimizer step is computed again with a higher exponent, which later steps keep.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from async_flowrl.training.parts import World
from async_flowrl.transfers import upload

FIRST_EXPONENT = -50  # Exponent of the first optimizer step of a run.
RANGE_BITS = 62  # Sums stay below 2^62 multiples, so that no int64 overflows.
# A step that is computed again leaves this many bits unused, so that similar steps after it fit at once.
HEADROOM_BITS = 4
# Every finite float32 is a multiple of 2^-149, so a magnitude is an integer (below 2^277) in this unit.
_SMALLEST = -149
_DIGIT_BITS, _DIGITS = 31, 11
# Elements after the gradient that carry the account through the all-reduce; 64 keeps an alignment of 512 bytes.
TAIL = 64
_MARK_DIGITS = 2
# Elements that are converted at a time; it bounds the memory for temporary tensors.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}


@dataclass(frozen=True)
class Account:
    """A record of the contributions in a sum."""

    count: int = 0  # Number of contributions.
    marks: int = 0  # Sum of their marks (see `mark_of`), which shows whether they are the planned ones.
    magnitude: int = 0  # Sum of their largest magnitudes, in multiples of 2^-149.

    def plus(self, mark: int, largest: float = 0.0) -> "Account":
        """Returns the account with one more contribution; `largest` is its largest magnitude and must be finite."""
        return self.joined(Account(1, mark, magnitude(largest)))

    def joined(self, other: "Account") -> "Account":
        marks = (self.marks + other.marks) % (1 << _DIGIT_BITS * _MARK_DIGITS)
        return Account(self.count + other.count, marks, self.magnitude + other.magnitude)

    def holds(self, planned: "Account") -> bool:
        """Returns True if it has the number and the marks of the planned contributions, so each is in it once."""
        return (self.count, self.marks) == (planned.count, planned.marks)

    def fits(self, exponent: int) -> bool:
        """Returns True if no sum of these contributions can reach 2^62 multiples of 2^exponent."""
        # Each contribution is rounded by at most half a multiple.
        return 2 * self.magnitude + (self.count << exponent - _SMALLEST) < 1 << RANGE_BITS + 1 + exponent - _SMALLEST


def magnitude(largest: float) -> int:
    """Returns a finite float32 of at least 0 as an integer, in multiples of 2^-149."""
    numerator, denominator = largest.as_integer_ratio()
    return numerator * (1 << -_SMALLEST) // denominator


def fitting_exponent(account: Account, exponent: int) -> int:
    """Returns the smallest exponent from `exponent` on with which the sum fits, plus HEADROOM_BITS."""
    while not account.fits(exponent):
        exponent += 1
    return exponent + HEADROOM_BITS


def mark_of(step: int, update: int, group: int, part: int) -> int:
    """Returns 62 bits of a hash that names a contribution; `Account.holds` compares sums of these marks."""
    digest = blake2b(f"{step}/{update}/{group}/{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


class ExactSum:
    """The sum [numel] int64 of one optimizer step on a rank: `begin`, `add` and `book` gradients, `reduce`, `mean`."""

    def __init__(self, numel: int, device: torch.device, memory: torch.device | None = None) -> None:
        """`device` has the gradients; the sum is in `memory` (None: there), which changes none of its bits."""
        self.exponent = FIRST_EXPONENT
        self._numel, self._device = numel, device
        self.values = torch.zeros(numel + TAIL, dtype=torch.int64, device=memory or device)
        self._beside = self.values.device.type == device.type
        # The sum of all ranks. With several ranks it has its own memory, so a failed reduction can be repeated.
        self.whole = self.values
        self._chunk = min(numel, _CHUNK.get(self.values.device.type, _CHUNK["cuda"]))
        self.account = Account()

    def begin(self) -> None:
        self.values.zero_()
        self.account = Account()

    def add(self, gradient: Tensor) -> Tensor:
        """Adds `gradient` [numel] float32 and sets it to zero; returns its largest magnitude (or NaN).

        Give that to `book`, which must find it finite, before the sum is used: other values have no integer. It waits
        for nothing, unless the sum is in other memory.
        """
        low, high = torch.aminmax(gradient)
        for start in range(0, self._numel, self._chunk):
            part = gradient[start : start + self._chunk]
            # Multiplying by a power of two is exact.
            part.mul_(2.0**-self.exponent).round_()
            self.values[start : start + len(part)].add_(part.to(self.values.device).to(torch.int64))
            part.zero_()
        return torch.maximum(-low, high)

    def book(self, mark: int, largest: float) -> None:
        """Enters a contribution in the account. `largest` is the value that `add` returned and must be finite."""
        self.account = self.account.plus(mark, largest)

    def reduce(self, world: World) -> Account:
        """Adds up the sums of all ranks and returns the account of the total; may be called again until `begin`."""
        if world.size > 1 and self.whole is self.values:
            self.whole = torch.empty_like(self.values)
        if self.whole is not self.values:
            self.whole.copy_(self.values)
        tail = self.whole[self._numel :]
        tail.copy_(upload(torch.tensor(to_digits(self.account)), tail.device))
        for part in torch.split(self.whole, len(self.whole) if self._beside else self._chunk) if world.size > 1 else ():
            total = part.to(self._device)
            world.sum(total)
            part.copy_(total)
        return from_digits(tail.tolist())

    def mean(self, out: Tensor, rows: int) -> None:
        """Writes the total of all ranks divided by `rows` to `out` [numel] float32; it divides in float64."""
        for start in range(0, self._numel, self._chunk):
            whole = self.whole[start : min(start + self._chunk, self._numel)]
            precise = whole.to(out.device).to(torch.float64)
            out[start : start + len(whole)].copy_(precise.mul_(2.0**self.exponent).div_(rows))

    def scratch(self) -> Tensor:
        """Returns [numel] float32 on the gradients' device, maybe the total's memory, until `begin` (or `reduce`)."""
        if not self._beside:
            return torch.empty(self._numel, device=self._device)
        return self.whole.view(torch.float32)[: self._numel]


def to_digits(account: Account) -> list[int]:
    digits = [account.count, *_digits(account.marks, _MARK_DIGITS), *_digits(account.magnitude, _DIGITS)]
    return digits + [0] * (TAIL - len(digits))


def from_digits(digits: list[int]) -> Account:
    count, rest = digits[0], digits[1:]
    marks = _number(rest[:_MARK_DIGITS]) % (1 << _DIGIT_BITS * _MARK_DIGITS)
    return Account(count, marks, _number(rest[_MARK_DIGITS : _MARK_DIGITS + _DIGITS]))


def _digits(value: int, count: int) -> list[int]:
    return [value >> _DIGIT_BITS * place & (1 << _DIGIT_BITS) - 1 for place in range(count)]


def _number(digits: list[int]) -> int:
    return sum(digit << _DIGIT_BITS * place for place, digit in enumerate(digits))


class ShardSum(ExactSum):
    """As ExactSum, of this rank's share [numel] of the gradient; only the account is added up over the ranks.

    FSDP2's reduce-scatter adds the gradients of the parts that the ranks compute side by side, as floats, in an order
    that the number of ranks fixes. Which parts these are is a function of their group (`World.by_group`), and
    such sums are added as integers. So no order of arrival changes a bit of the total; another number of ranks does.
    """

    def book_magnitude(self, largest: float) -> None:
        """Enters a sum to which this rank's part did not contribute; `largest` is what `add` returned, and finite."""
        self.account = self.account.joined(Account(magnitude=magnitude(largest)))

    def reduce(self, world: World) -> Account:
        """Returns the account of all ranks, equal on every rank; the values are the ranks' total already."""
        tail = upload(torch.tensor(to_digits(self.account)), self._device)
        world.sum(tail)
        return from_digits(tail.tolist())
