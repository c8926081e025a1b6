"""Held-out scores of evaluated prompts (`evaluate.reward.terms`), computed by the workers of the first reward pool.

dispatch.py calls `ask_held_out` after the reward of a group. Failures of held-out terms do not end the run.
"""

import asyncio
from dataclasses import replace

from async_flowrl.controller.context import Context, book_span
from async_flowrl.controller.scoring import FAILURES, Free, reward_failed
from async_flowrl.rewards.held_out import HeldOutScores
from async_flowrl.tickets.table import EVALUATION, Ticket, describe
from separation.supervise import deadline


async def ask_held_out(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Sets `held_out` of the tickets of an evaluation's group; does nothing for training groups.

    Terms that fail are asked again after `reward.backoff` seconds, doubled each time, up to `reward.retries` times.
    Terms that still fail are in `HeldOutScores.failed`. Raises RefLost if the images are lost.
    """
    terms, config = ctx.config.evaluate.reward.terms, ctx.config.reward
    if group[0].kind != EVALUATION or not terms:
        return
    answer = HeldOutScores({}, dict.fromkeys(terms, "not asked yet"))
    for attempt in range(config.retries + 1):
        await ctx.servers.up(tuple(answer.failed))
        lost = {name: why for name, why in ctx.servers.lost().items() if name in answer.failed}
        answer = replace(answer, failed={**answer.failed, **lost})
        if asked := tuple(name for name in answer.failed if name not in lost):
            answer = await _ask(ctx, group, free, answer, asked)
        if answer.failed.keys() == lost.keys():
            break
        if attempt < config.retries:
            await asyncio.sleep(config.backoff * 2**attempt)
    for name, message in answer.failed.items():
        first = group[0]
        ctx.observer.event(
            "skipped", kind=first.kind, step=first.step, group=first.group, message=f"held-out {name}: {message}"
        )
    for ticket in group:
        ticket.held_out = answer


async def _ask(
    ctx: Context, group: list[Ticket], free: Free, before: HeldOutScores, asked: tuple[str, ...]
) -> HeldOutScores:
    """Returns `before`, updated with the result of one call for the terms `asked`."""
    pool = next(iter(ctx.rewards))
    index = await free[pool].get()
    worker = ctx.rewards[pool].workers[index]
    images = [ticket.payload[0] for ticket in group]
    ctx.observer.state(worker.name, "busy")
    try:
        async with deadline(ctx.config.deadlines.score, f"score: held-out terms of {describe(group[0])}"):
            answer: HeldOutScores = await worker.call("score_held_out", asked, ctx.requests.prompt(group[0]), *images)
    except FAILURES as error:
        await reward_failed(ctx, pool, index, error)
        return replace(before, failed={**before.failed, **dict.fromkeys(asked, f"{type(error).__name__}: {error}")})
    finally:
        free[pool].put_nowait(index)
        ctx.observer.state(ctx.rewards[pool].workers[index].name, "wait_data")
    ctx.servers.heard(answer.served)
    for span in answer.spans:
        book_span(ctx.observer, worker.name, span)
    extras, distances = {**before.extras, **answer.extras}, {**before.distances, **answer.distances}
    kept = {name: why for name, why in before.failed.items() if name not in asked}
    by_term, failed = {**before.by_term, **answer.by_term}, {**kept, **answer.failed}
    return HeldOutScores(by_term, failed, distances=distances, extras=extras)
