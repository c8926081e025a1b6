"""Scoring of groups: every reward pool scores a group by its own terms, all pools concurrently (for dispatch.py)."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from async_flowrl.config.pools import held_out_by_pool, is_reward_pool, reward_pools
from async_flowrl.controller.context import Context, Servers
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.composite import combined
from async_flowrl.rewards.held_out import HeldOutScores, joined
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket, describe
from async_flowrl.types import Failure, Scores
from separation.group import RefLost, WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded, deadline, together

# Errors of a call of a reward worker after which the call is repeated.
FAILURES = (WorkerDied, WorkerFailed, DeadlineExceeded)

Free = Mapping[str, asyncio.Queue[int]]  # Reward pool → queue of the indices of its idle workers.


def free_workers(ctx: Context) -> Free:
    """Returns queues with all workers of all reward pools, for the start of an attempt."""
    free: dict[str, asyncio.Queue[int]] = {}
    for pool, group in ctx.rewards.items():
        places = free[pool] = asyncio.Queue()
        for index in range(len(group.workers)):
            places.put_nowait(index)
    return free


async def ask_reward(ctx: Context, group: list[Ticket], free: Free) -> Scores | None:
    """Scores a whole group by one call per pool, on its next idle worker; failures are retried.

    Terms with `required: false` that have no score are in `Scores.failed`. If a required term or all have none, the
    last failure or RewardError ends the run; for evaluations and with `reward.on_error=skip` the result is None. Raises
    RefLost.
    """
    pools = [pool for pool in ctx.rewards if is_reward_pool(pool)]
    answers = await together(*(ask_pool(ctx, pool, group, free[pool]) for pool in pools))
    for answer in answers:
        if isinstance(answer, RefLost):
            raise answer
    first = group[0]
    scores = combined(ctx.config.reward.terms, [answer for answer in answers if isinstance(answer, Scores)])
    if first.kind == TRAIN:
        ctx.reward_calls.add(first.step, scores)
    fatal = required(ctx, scores) or (() if scores.by_term else tuple(scores.failed))
    if not fatal:
        return scores
    if ends_run(ctx, group):
        raise RewardError(scores.failed[fatal[0]].reason)
    message = scores.failed[fatal[0]].reason
    ctx.observer.event("skipped", kind=first.kind, step=first.step, group=first.group, message=message)
    return None


def required(ctx: Context, scores: Scores) -> tuple[str, ...]:
    """Returns the failed terms that are required."""
    terms = ctx.config.reward.terms
    return tuple(name for name in scores.failed if terms[name].required)


def ends_run(ctx: Context, group: list[Ticket]) -> bool:
    """Returns True if a missing score of this group must end the run."""
    return ctx.config.reward.on_error == "fail" and group[0].kind == TRAIN


async def ask_pool(ctx: Context, pool: str, group: list[Ticket], places: asyncio.Queue[int]) -> Scores | RefLost:
    """Returns the group's scores by one pool's terms; terms that failed for good are in `failed`.

    A failed term is asked again of the next idle worker, up to `reward.retries` times, unless its failure is final.
    Raises the last failure of a required term if it ends the run. RefLost is returned: the other pools' calls must end
    first.
    """
    config = ctx.config.reward
    images = [ticket.payload.images for ticket in group]
    parts: list[Scores] = []
    terms = next(reward_pool.terms for reward_pool in reward_pools(config) if reward_pool.name == pool)
    only: tuple[str, ...] | None = None
    for attempt in range(config.retries + 1):
        await ctx.servers.up(terms)
        if gone := without_server(ctx.servers, only or terms):
            parts.append(gone)
            only = tuple(name for name in only or terms if name not in gone.failed)
            if not only:
                break
        index, error_of_call = await places.get(), None
        try:
            parts.append(await score_once(ctx, pool, index, group, only, images))
        except RefLost as gone:
            return gone
        except FAILURES as error:
            error_of_call = error
            parts.append(Scores((), {}, failed={name: Failure(str(error)) for name in only or terms}))
            await reward_failed(ctx, pool, index, error)
        finally:
            places.put_nowait(index)
        again = tuple(name for name, failure in parts[-1].failed.items() if not failure.final)
        if not again or attempt == config.retries:
            break
        parts.append(Scores((), {}, retries=dict.fromkeys(again, 1)))
        only = again if len(again) < len(terms) else None
        await asyncio.sleep(config.backoff * 2**attempt)
    scores = combined(config.terms, parts)
    fatal = required(ctx, scores)
    if fatal and ends_run(ctx, group):
        failure = scores.failed[fatal[0]]
        reward_error = RewardError(failure.reason)
        reward_error.add_note(f"in the worker:\n{failure.traceback}")
        raise error_of_call or reward_error
    return scores


def without_server(servers: Servers, terms: Sequence[str]) -> Scores | None:
    """Returns failures of those of the terms that have lost all of their servers; None if there are none."""
    failed = {name: Failure(why, final=True) for name, why in servers.lost().items() if name in terms}
    return Scores((), {}, failed=failed) if failed else None


async def score_once(
    ctx: Context, pool: str, index: int, group: list[Ticket], only: Sequence[str] | None, images: list[object]
) -> Scores:
    """Calls a worker for the terms `only` (None: all). Raises DeadlineExceeded, WorkerDied, WorkerFailed, RefLost."""
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.state(worker.name, "busy")
    what = f"score: {describe(group[0])} on {worker.name}"
    prompt = ctx.requests.prompt(group[0])
    call = ("score", prompt) if only is None else ("score_terms", only, prompt)
    async with deadline(ctx.config.deadlines.score, what):
        scores: Scores = await worker.call(*call, *images)
    for span in scores.spans:
        ctx.observer.span(worker.name, span)
    for failure in scores.failed.values():
        ctx.observer.event("fault", worker=worker.name, kind="RewardError", message=failure.reason)
    ctx.observer.state(worker.name, "wait_data")
    return scores


async def reward_failed(ctx: Context, pool: str, index: int, error: Exception) -> None:
    """Records the failure of a call as an event; a worker that has died or exceeded its deadline is replaced."""
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
    if not isinstance(error, WorkerFailed):
        worker.kill()
        await ctx.rewards[pool].replace(index)


async def ask_held_out(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Sets `held_out` of an evaluation's tickets by all pools at once. Raises RefLost once all calls have ended."""
    if group[0].kind != EVALUATION or not ctx.config.evaluate.reward.terms:
        return
    pools = held_out_by_pool(ctx.config)
    answers = await together(*(ask_held_out_pool(ctx, pool, terms, group, free) for pool, terms in pools.items()))
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


async def ask_held_out_pool(
    ctx: Context, pool: str, terms: Collection[str], group: list[Ticket], free: Free
) -> HeldOutScores | RefLost:
    """Returns the group's scores by the held-out terms of one pool; those that fail are retried with back-off.

    Terms that still fail are in `failed`, at once if the pool is lost. RefLost is returned, as other pools are still
    asked.
    """
    config = ctx.config.reward
    answer = HeldOutScores({}, dict.fromkeys(terms, "not asked yet"))
    for attempt in range(config.retries + 1):
        await ctx.servers.up(tuple(answer.failed))
        unserved = {name: why for name, why in ctx.servers.lost().items() if name in answer.failed}
        answer = replace(answer, failed={**answer.failed, **unserved})
        if names := tuple(name for name in answer.failed if name not in unserved):
            try:
                answer = await _ask(ctx, pool, group, free, answer, names)
            except RefLost as gone:
                return gone
        if answer.failed.keys() == unserved.keys() or pool in ctx.lost_pools:
            break
        if attempt < config.retries:
            await asyncio.sleep(config.backoff * 2**attempt)
    return answer


async def _ask(
    ctx: Context, pool: str, group: list[Ticket], free: Free, before: HeldOutScores, names: tuple[str, ...]
) -> HeldOutScores:
    """Returns `before`, updated with the result of one call of one worker for the terms `names`."""
    index = await free[pool].get()
    if pool in ctx.lost_pools:
        free[pool].put_nowait(index)
        return replace(before, failed={**before.failed, **dict.fromkeys(names, ctx.lost_pools[pool])})
    worker = ctx.rewards[pool].workers[index]
    images = [ticket.payload.images for ticket in group]
    ctx.observer.state(worker.name, "busy")
    try:
        async with deadline(ctx.config.deadlines.score, f"score: held-out terms of {describe(group[0])}"):
            answer: HeldOutScores = await worker.call("score_held_out", names, ctx.requests.prompt(group[0]), *images)
    except FAILURES as error:
        await held_out_failed(ctx, pool, index, error)
        return replace(before, failed={**before.failed, **dict.fromkeys(names, f"{type(error).__name__}: {error}")})
    finally:
        free[pool].put_nowait(index)
        ctx.observer.state(ctx.rewards[pool].workers[index].name, "wait_data")
    for span in answer.spans:
        ctx.observer.span(worker.name, span)
    kept = {name: why for name, why in before.failed.items() if name not in names}
    return joined((replace(before, failed=kept), answer))


async def held_out_failed(ctx: Context, pool: str, index: int, error: Exception) -> None:
    """Acts as `reward_failed`, but a pool for evaluations alone that gets no successor is lost, and the run goes on."""
    try:
        await reward_failed(ctx, pool, index, error)
    except FAILURES as reason:
        if is_reward_pool(pool):
            raise
        ctx.lost_pools[pool] = f"its worker had no successor: {type(reason).__name__}: {reason}"
        name = ctx.rewards[pool].workers[index].name
        ctx.observer.event("fault", worker=name, kind="PoolLost", message=ctx.lost_pools[pool])
