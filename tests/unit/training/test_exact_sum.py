"""Tests of the exact sum against Python's integers and fractions, of its limits, and of a step that reaches them."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from async_flowrl.training.exact import (
    FIRST_EXPONENT,
    HEADROOM_BITS,
    Account,
    ExactSum,
    fitting_exponent,
    from_digits,
    mark_of,
    to_digits,
)
from async_flowrl.training.parts import World
from async_flowrl.training.update import NonFiniteError
from tests.support import trainer_rig as rig
from tests.unit.training.trainer_ranks import _step

CPU = torch.device("cpu")


def referee(contributions: list[torch.Tensor], exponent: int, rows: int) -> list[float]:
    """Each value rounded to a multiple, half to even; integers added; one division; no floats until then."""
    totals = [0] * len(contributions[0])
    for contribution in contributions:
        for place, value in enumerate(contribution.tolist()):
            totals[place] += round(Fraction(value) / Fraction(2) ** exponent)
    # float() of a Fraction is correctly rounded to float64; so is the trainer's division of an integer it can hold.
    return [float(np.float32(float(Fraction(total) * Fraction(2) ** exponent / rows))) for total in totals]


def added(contributions: list[torch.Tensor], rows: int, exponent: int = FIRST_EXPONENT) -> torch.Tensor:
    total, out = ExactSum(len(contributions[0]), CPU), torch.empty(len(contributions[0]))
    total.exponent = exponent
    total.begin()
    for index, contribution in enumerate(contributions):
        total.book(index, float(total.add(contribution.clone())))
    assert total.reduce(World()).count == len(contributions)
    total.mean(out, rows)
    return out


def drawn(seed: int, count: int, size: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-9, 3e-15])
def test_python_integers_give_the_same_sum(scale: float) -> None:
    given = drawn(0, 9, 300, scale)
    assert added(given, 96).tolist() == referee(given, FIRST_EXPONENT, 96)
    assert added(given, 96, -20).tolist() == referee(given, -20, 96)


def test_no_order_changes_a_bit_and_floats_would() -> None:
    given = drawn(1, 20, 4000, 1e-3)
    order = random.Random(0).sample(given, len(given))
    assert torch.equal(added(given, 7), added(order, 7))
    assert not torch.equal(sum(given[1:], given[0]), sum(order[1:], order[0]))


def test_the_account_is_exact_whoever_holds_its_parts() -> None:
    largest = [3.4e38, 1e-45, 1.5, 0.1, 0.0, 2.0**-149]
    values = [float(np.float32(value)) for value in largest]
    whole = Account()
    for place, value in enumerate(values):
        whole = whole.plus(mark_of(3, 0, place, 1), value)
    assert whole.magnitude == sum(int(Fraction(value) * 2**149) for value in values)
    halves = [Account(), Account()]
    for place, value in enumerate(values):
        halves[place % 2] = halves[place % 2].plus(mark_of(3, 0, place, 1), value)
    digits = [sum(pair) for pair in zip(*(to_digits(half) for half in halves), strict=True)]
    assert from_digits(digits) == whole and max(digits) < 2**32
    assert len({mark_of(s, u, g, p) for s in range(9) for u in range(3) for g in range(9) for p in range(3)}) == 729


@pytest.mark.parametrize("largest", [5000.0, 3e8, 3e38])
def test_the_next_exponent_fits_with_room(largest: float) -> None:
    account = Account().plus(1, largest).plus(2, largest)
    assert not account.fits(FIRST_EXPONENT)
    found = fitting_exponent(account, FIRST_EXPONENT)
    assert account.fits(found - HEADROOM_BITS) and not account.fits(found - HEADROOM_BITS - 1)


def test_a_referee_finds_the_gradient_of_a_real_step(
    handed: list[list[rig.Handed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contributions, means = list[torch.Tensor](), list[torch.Tensor]()
    add, mean = ExactSum.add, ExactSum.mean

    def recorded(self: ExactSum, gradient: torch.Tensor) -> torch.Tensor:
        contributions.append(gradient.clone())
        return add(self, gradient)

    def kept(self: ExactSum, out: torch.Tensor, rows: int) -> None:
        mean(self, out, rows)
        means.append(out.clone())  # the step's length is measured in that memory later

    monkeypatch.setattr(ExactSum, "add", recorded)
    monkeypatch.setattr(ExactSum, "mean", kept)
    worker = rig.trainer(rig.tiny_config(micro_batch_size=2, max_grad_norm=math.inf))
    rig.update(worker, 0, handed[0])
    assert len(contributions) == 4
    rows = rig.rows(handed[0])
    places = torch.arange(0, len(contributions[0]), 7)
    some = [contribution[places] for contribution in contributions]
    assert means[0][places].tolist() == referee(some, FIRST_EXPONENT, rows)
    exact = sum(c.double() for c in contributions) / rows
    error = torch.linalg.vector_norm(means[0].double() - exact.float().double())
    assert error <= 1e-7 * torch.linalg.vector_norm(exact)


def test_a_sum_that_could_overflow_is_computed_again(handed: list[list[rig.Handed]]) -> None:
    """Multiples of 2^-80 are too small for these gradients: the same weights as a run that knew that."""
    plan = rig.StepPlan(rows=rig.rows(handed[0]))
    narrow, knowing, usual = (rig.trainer(rig.tiny_config()) for _ in range(3))
    narrow.update.exponent = -80
    owned = [(replace(meta, owners=(0,) * len(meta.parts)), tickets) for meta, tickets in handed[0]]
    stats = _step(narrow, 0, owned, plan)
    assert narrow.update.exponent > -80
    knowing.update.exponent = narrow.update.exponent
    assert _step(knowing, 0, owned, plan).metrics == stats.metrics
    assert narrow.parameters.fingerprint() == knowing.parameters.fingerprint() and narrow.optimizer.steps == 1
    before = usual.parameters.fingerprint()
    usual.update.exponent = -80
    for group in handed[0]:
        usual.train(rig.TrainRequest(0, (group[0],), plan if group is handed[0][0] else None), *group[1])
    for _ in range(2):  # again where a rank died before all others had the whole
        assert usual.add_up(rig.TrainRequest(0, ())) == usual.update.exponent == -80
    usual.update.begin(0, plan)
    assert usual.update.exponent == knowing.update.exponent
    assert usual.parameters.fingerprint() == before and usual.versions.newest == 0, "nothing was changed"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(
    handed: list[list[rig.Handed]], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = rig.trainer(rig.tiny_config())
    before, add = worker.parameters.fingerprint(), ExactSum.add

    def spoiled(self: ExactSum, gradient: torch.Tensor) -> torch.Tensor:
        gradient[3] = value
        return add(self, gradient)

    monkeypatch.setattr(ExactSum, "add", spoiled)
    with pytest.raises(NonFiniteError, match=rf"step 0, group 0: the gradient is {value}"):
        rig.update(worker, 0, handed[0])
    assert worker.parameters.fingerprint() == before
