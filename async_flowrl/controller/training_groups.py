"""TrainingGroup, a group of a step that the ticket table has handed over to the trainer, with its advantages.

trainer.py calls `hand_over`; replicas.py calls the other functions if a group's trajectories are lost.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from async_flowrl.algorithms.base import Algorithm, differentiates_reward
from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import make_again
from async_flowrl.seeds import derive
from async_flowrl.tickets.request import teacher_of
from async_flowrl.tickets.table import Ticket
from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.parts import cut
from async_flowrl.types import Scores
from separation.group import RefLost


@dataclass(frozen=True)
class TrainingGroup:
    """One group of the trainer's step, with one advantage per image."""

    tickets: list[Ticket]
    scores: Scores | None
    advantages: tuple[float, ...]
    # Description for the trainer ranks. None if the group is not trained: it has no scores, or all advantages are zero
    # and the algorithm's loss is then zero or `algorithm.zero_std_groups` is drop.
    meta: GroupMeta | None
    # Held while its trajectories are made again, for all ranks that lack them.
    remaking: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False, repr=False)

    @property
    def number(self) -> int:
        return self.tickets[0].group

    @property
    def refs(self) -> list[Any]:
        return [ticket.payload.trajectory for ticket in self.tickets]


def hand_over(ctx: Context, algorithm: Algorithm, step: int, groups: Sequence[int]) -> list[TrainingGroup]:
    """Takes ready groups from the table and computes their advantages together, without owners yet. Raises Refused."""
    tickets = [ctx.table.hand_over(step, group) for group in groups]
    scores: list[Scores | None] = [group[0].scores for group in tickets]
    scored = [index for index, value in enumerate(scores) if value is not None]
    seeds = [derive(ctx.config.seed, "permute", step, tickets[index][0].group) for index in scored]
    scores_present = [score for score in scores if score is not None]
    values = dict(zip(scored, group_advantages(algorithm, ctx.config, scores_present, seeds), strict=True))
    skips = algorithm.vanishes_at_zero or ctx.config.algorithm.zero_std_groups == "drop"
    training_groups = []
    for index, of_group in enumerate(tickets):
        advantages = tuple(float(value) for value in values.get(index, ()))
        trained = scores[index] is not None and (any(advantages) or not skips)
        meta = _meta(ctx, algorithm, of_group, advantages) if trained else None
        training_groups.append(TrainingGroup(of_group, scores[index], advantages, meta))
    return training_groups


def _meta(ctx: Context, algorithm: Algorithm, tickets: list[Ticket], advantages: tuple[float, ...]) -> GroupMeta:
    first, config = tickets[0], ctx.config
    parts = cut(algorithm.select(np.asarray(advantages)), config.trainer.micro_batch_size)
    return GroupMeta(
        group=first.group,
        tickets=len(tickets),
        version=first.version,
        age=first.step - first.version,
        advantages=advantages,
        parts=parts,
        seeds=tuple(ctx.requests.image_seed("row", first.step, first.group, i) for i in range(config.group_size)),
        negative=ctx.requests.prompt(first).negative_wording(config.rollout.negative_prompt),
        sampling=ctx.requests.sampling(first),
        prompt=ctx.requests.prompt(first) if differentiates_reward(algorithm) else None,
        teacher=teacher_of(config.algorithm.teachers, ctx.requests.prompt(first)),
    )


async def until_whole(groups: Sequence[TrainingGroup]) -> None:
    """Waits while the trajectories of any of the groups are being made again for another replica."""
    while remade := [group for group in groups if group.remaking.locked()]:
        async with remade[0].remaking:
            pass


async def make_group_again(ctx: Context, group: TrainingGroup, lost: RefLost, tried: Sequence[Any]) -> None:
    """Waits until the group's lost trajectories (of the refs `tried`) are made again; the group keeps its scores."""
    async with group.remaking:
        if any(now is not before for now, before in zip(group.refs, tried, strict=True)):
            return
        first = group.tickets[0]
        make_again(ctx, group.tickets, lost)
        await ctx.ready.until(lambda: ctx.table.ready(first.step, first.group))
        ctx.table.hand_over(first.step, first.group)
        for ticket in group.tickets:
            ticket.scores = group.scores


FloatArray = npt.NDArray[np.float64]


def group_advantages(
    algorithm: Algorithm, config: Config, scores: Sequence[Scores], seeds: Sequence[int]
) -> list[FloatArray]:
    """Returns one float64 array [n] of advantages per group of n images, in the order of `scores`.

    `seeds` (one per group) are for `algorithm.permute_advantages`. A group that lacks an optional term gets the sum of
    its others, and with `algorithm.combine=per_reward` does not count in the statistics of that term.
    """
    if not scores:
        return []
    terms = config.reward.terms
    weights = {name: term.weight for name, term in terms.items()}
    whole = all(name in group.by_term for group in scores for name in terms)
    if whole or config.algorithm.combine == "sum":
        rewards = {name: [_values(group, name) for group in scores] for name in terms}
        return list(algorithm.advantages(rewards, weights=weights, seeds=seeds))
    total = [np.zeros(len(group.total)) for group in scores]
    for name in terms:
        if having := _there(scores, name):
            rewards = {name: [_values(scores[index], name) for index in having]}
            seeds_there = [seeds[index] for index in having]
            parts = algorithm.advantages(rewards, weights={name: weights[name]}, seeds=seeds_there)
            for index, part in zip(having, parts, strict=True):
                total[index] = total[index] + part
    return total


def _there(scores: Sequence[Scores], name: str) -> list[int]:
    return [index for index, group in enumerate(scores) if name in group.by_term]


def _values(scores: Scores, name: str) -> FloatArray:
    values = scores.by_term.get(name)
    return np.zeros(len(scores.total)) if values is None else np.asarray(values, dtype=np.float64)
