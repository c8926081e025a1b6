"""Held-out scores of evaluated prompts (`evaluate.reward.terms`), by the first reward pool or by pools of their own.

dispatch.py calls `ask_held_out` after the reward of a group. Failures of held-out terms do not end the run.
"""

import asyncio
from collections.abc import Collection
from dataclasses import replace

from async_flowrl.config.pools import held_out_by_pool, is_reward_pool
from async_flowrl.controller.context import Context
from async_flowrl.controller.scoring import FAILURES, Free, reward_failed
from async_flowrl.rewards.held_out import HeldOutScores, joined
from async_flowrl.tickets.table import EVALUATION, Ticket, describe
from separation.group import RefLost
from separation.supervise import deadline, together


async def ask_held_out(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Sets `held_out` of the tickets of an evaluation's group; does nothing for training groups.

    All pools are asked at the same time. Raises RefLost if the images are lost, once all calls have ended.
    """
    if group[0].kind != EVALUATION or not ctx.config.evaluate.reward.terms:
        return
    pools = held_out_by_pool(ctx.config)
    answers = await together(*(ask_pool(ctx, pool, terms, group, free) for pool, terms in pools.items()))
    for answer in answers:
        if isinstance(answer, RefLost):
            raise answer
    held_out = joined(answer for answer in answers if isinstance(answer, HeldOutScores))
    for name, message in held_out.failed.items():
        first = group[0]
        ctx.observer.event(
            "skipped", kind=first.kind, step=first.step, group=first.group, message=f"held-out {name}: {message}"
        )
    for ticket in group:
        ticket.held_out = held_out


async def ask_pool(
    ctx: Context, pool: str, terms: Collection[str], group: list[Ticket], free: Free
) -> HeldOutScores | RefLost:
    """Returns the group's scores by the held-out terms of one pool.

    Terms that fail are asked again after `reward.backoff` seconds, doubled each time, up to `reward.retries` times.
    Terms that still fail are in `HeldOutScores.failed`, at once if the pool is lost. RefLost is returned, because other
    pools may still be asked.
    """
    config = ctx.config.reward
    answer = HeldOutScores({}, dict.fromkeys(terms, "not asked yet"))
    for attempt in range(config.retries + 1):
        await ctx.servers.up(tuple(answer.failed))
        lost = {name: why for name, why in ctx.servers.lost().items() if name in answer.failed}
        answer = replace(answer, failed={**answer.failed, **lost})
        if asked := tuple(name for name in answer.failed if name not in lost):
            try:
                answer = await _ask(ctx, pool, group, free, answer, asked)
            except RefLost as gone:
                return gone
        if answer.failed.keys() == lost.keys() or pool in ctx.lost_pools:
            break
        if attempt < config.retries:
            await asyncio.sleep(config.backoff * 2**attempt)
    return answer


async def _ask(
    ctx: Context, pool: str, group: list[Ticket], free: Free, before: HeldOutScores, asked: tuple[str, ...]
) -> HeldOutScores:
    """Returns `before`, updated with the result of one call of one worker for the terms `asked`."""
    index = await free[pool].get()
    if pool in ctx.lost_pools:
        free[pool].put_nowait(index)
        return replace(before, failed={**before.failed, **dict.fromkeys(asked, ctx.lost_pools[pool])})
    worker = ctx.rewards[pool].workers[index]
    images = [ticket.payload.images for ticket in group]
    ctx.observer.state(worker.name, "busy")
    try:
        async with deadline(ctx.config.deadlines.score, f"score: held-out terms of {describe(group[0])}"):
            answer: HeldOutScores = await worker.call("score_held_out", asked, ctx.requests.prompt(group[0]), *images)
    except FAILURES as error:
        await held_out_failed(ctx, pool, index, error)
        return replace(before, failed={**before.failed, **dict.fromkeys(asked, f"{type(error).__name__}: {error}")})
    finally:
        free[pool].put_nowait(index)
        ctx.observer.state(ctx.rewards[pool].workers[index].name, "wait_data")
    for span in answer.spans:
        ctx.observer.span(worker.name, span)
    kept = {name: why for name, why in before.failed.items() if name not in asked}
    return joined((replace(before, failed=kept), answer))


async def held_out_failed(ctx: Context, pool: str, index: int, error: Exception) -> None:
    """Acts as `reward_failed`, but if a pool that scores only evaluations has no successor for a worker, it is lost.

    The loss is an event; the run goes on.
    """
    try:
        await reward_failed(ctx, pool, index, error)
    except FAILURES as reason:
        if is_reward_pool(pool):
            raise
        ctx.lost_pools[pool] = f"its worker had no successor: {type(reason).__name__}: {reason}"
        name = ctx.rewards[pool].workers[index].name
        ctx.observer.event("fault", worker=name, kind="PoolLost", message=ctx.lost_pools[pool])
