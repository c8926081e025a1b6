"""A sum of gradients that has the same bits in any order and on any number of ranks.

Float addition is not associative, integer addition is. Every contribution is rounded once to a multiple of 2^exponent
and added as int64, ranks are added as int64, and the whole is converted back once. With the first exponent a value of
2^-27 and more loses nothing, a smaller one at most 2^-51; between them and the range of 2^12 lies room for thousands of
contributions as large as any that was measured. One exponent for all tensors: one per tensor would need a pass over the
gradients to find them before the pass that adds, and one more agreement between the ranks.

Whether a sum stays in range must not depend on which rank added what: the contributions' largest magnitudes are added
exactly, over all ranks, and that sum alone decides. If it could reach 2^62, nothing is used; the whole step is computed
again with a higher exponent, which later steps keep.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from async_flowrl.training.fsdp import World
from async_flowrl.transfers import upload

FIRST_EXPONENT = -50
"""Of the first step; fixed, so that nothing but the contributions themselves can change it."""
RANGE_BITS = 62
"""Every sum stays below 2^62 multiples, so that no partial sum of an int64 wraps."""
HEADROOM_BITS = 4
"""A step that is computed again leaves so many bits unused, so that the next one of its kind fits at once."""
_SMALLEST = -149
"""Every float32 is a multiple of 2^-149: a largest magnitude is an integer there, below 2^277."""
_DIGIT_BITS, _DIGITS = 31, 11
_TAIL = 64
"""Elements behind the gradient that are reduced with it; 64 keeps 512 bytes alignment."""
_MARK_DIGITS = 2
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements converted at a time: the temporaries are this long, whatever the gradient's length."""


@dataclass(frozen=True)
class Account:
    """What contributions are in a sum: how many, which (the sum of their marks), and their largest magnitudes, added
    exactly in multiples of 2^-149."""

    count: int = 0
    marks: int = 0
    magnitude: int = 0

    def plus(self, mark: int, largest: float = 0.0) -> "Account":
        """One contribution more. `largest` must be finite."""
        marks = (self.marks + mark) % (1 << _DIGIT_BITS * _MARK_DIGITS)
        return Account(self.count + 1, marks, self.magnitude + magnitude(largest))

    def joined(self, other: "Account") -> "Account":
        """The contributions of both."""
        marks = (self.marks + other.marks) % (1 << _DIGIT_BITS * _MARK_DIGITS)
        return Account(self.count + other.count, marks, self.magnitude + other.magnitude)

    def holds(self, planned: "Account") -> bool:
        """Whether exactly the planned contributions are in it, each once."""
        return (self.count, self.marks) == (planned.count, planned.marks)

    def fits(self, exponent: int) -> bool:
        """Whether no sum of these contributions, rounded to multiples of 2^exponent, can reach 2^62 of them."""
        # Each contribution is rounded by at most half a multiple.
        return 2 * self.magnitude + (self.count << exponent - _SMALLEST) < 1 << RANGE_BITS + 1 + exponent - _SMALLEST


def magnitude(largest: float) -> int:
    """A float32 of at least 0 as an integer, in multiples of 2^-149."""
    numerator, denominator = largest.as_integer_ratio()
    return numerator * (1 << -_SMALLEST) // denominator


def fitting_exponent(account: Account, exponent: int) -> int:
    """The smallest exponent above `exponent` in which the sum fits, with headroom."""
    while not account.fits(exponent):
        exponent += 1
    return exponent + HEADROOM_BITS


def mark_of(step: int, update: int, group: int, part: int) -> int:
    """62 bits that name a contribution: the sum of the marks tells whether each was added exactly once."""
    digest = blake2b(f"{step}/{update}/{group}/{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


class ExactSum:
    """The sum of one optimizer step's gradients, [numel] int64 on `device`, and the account of what is in it."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.exponent = FIRST_EXPONENT
        self._numel = numel
        self._values = torch.zeros(numel + _TAIL, dtype=torch.int64, device=device)
        self._whole = self._values
        """The sum of all ranks: of several in memory of its own, because this rank's must outlive a reduction that
        breaks off."""
        self._chunk = min(numel, _CHUNK.get(device.type, _CHUNK["cuda"]))
        self._account = Account()

    def begin(self) -> None:
        self._values.zero_()
        self._account = Account()

    def add(self, gradient: Tensor) -> Tensor:
        """Adds a contribution [numel] float32 and leaves zeros in its place. Nothing waits for the device.

        Returns its largest magnitude, NaN where it has one. Until that went to `book`, the sum must not be used: what
        is not finite or out of range has no integer.
        """
        low, high = torch.aminmax(gradient)
        for start in range(0, self._numel, self._chunk):
            part = gradient[start : start + self._chunk]
            # A power of two: the product is exact, and so is the rounding of what has 24 bits.
            part.mul_(2.0**-self.exponent).round_()
            self._values[start : start + len(part)].add_(part.to(torch.int64))
            part.zero_()
        return torch.maximum(-low, high)

    def book(self, mark: int, largest: float) -> None:
        """Enters an added contribution in the account. `largest` is what `add` returned, and must be finite."""
        self._account = self._account.plus(mark, largest)

    def reduce(self, world: World) -> Account:
        """Adds up the ranks; returns the account of the whole, the same on every rank.

        What this rank has added stays as it is until `begin`, so that it can be reduced again.
        """
        if world.size > 1 and self._whole is self._values:
            self._whole = torch.empty_like(self._values)
        if self._whole is not self._values:
            self._whole.copy_(self._values)
        tail = self._whole[self._numel :]
        tail.copy_(upload(torch.tensor(_written(self._account)), tail.device))
        world.sum(self._whole)
        return _read(tail.tolist())

    def mean(self, out: Tensor, rows: int) -> None:
        """Writes the sum ÷ `rows` to `out` [numel] float32: to float64, divided, to float32."""
        for start in range(0, self._numel, self._chunk):
            whole = self._whole[start : min(start + self._chunk, self._numel)]
            out[start : start + len(whole)].copy_(whole.to(torch.float64).mul_(2.0**self.exponent).div_(rows))

    def scratch(self) -> Tensor:
        """[numel] float32 in the memory of a whole that was used; `begin` or `reduce` takes it back."""
        return self._whole.view(torch.float32)[: self._numel]


def _written(account: Account) -> list[int]:
    """Digits that ranks may add one by one: below 2^31 each, so that billions of them do not wrap."""
    digits = [account.count, *_digits(account.marks, _MARK_DIGITS), *_digits(account.magnitude, _DIGITS)]
    return digits + [0] * (_TAIL - len(digits))


def _read(digits: list[int]) -> Account:
    count, rest = digits[0], digits[1:]
    marks = _number(rest[:_MARK_DIGITS]) % (1 << _DIGIT_BITS * _MARK_DIGITS)
    return Account(count, marks, _number(rest[_MARK_DIGITS : _MARK_DIGITS + _DIGITS]))


def _digits(value: int, count: int) -> list[int]:
    return [value >> _DIGIT_BITS * place & (1 << _DIGIT_BITS) - 1 for place in range(count)]


def _number(digits: list[int]) -> int:
    return sum(digit << _DIGIT_BITS * place for place, digit in enumerate(digits))
