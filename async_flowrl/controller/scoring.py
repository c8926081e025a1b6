"""Scoring of groups: every reward pool scores a group by its own terms, all pools concurrently (for dispatch.py)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from async_flowrl.config.schema import RewardConfig
from async_flowrl.config.scoring_pools import is_reward_pool
from async_flowrl.controller.context import Context
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.composite import combined
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket, describe
from async_flowrl.types import Failure, Scores
from separation.group import RefLost, WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded, deadline, together

logger = logging.getLogger(__name__)

# Errors of a call of a reward worker after which the call is repeated.
FAILURES = (WorkerDied, WorkerFailed, DeadlineExceeded)

Free = Mapping[str, asyncio.Queue[int]]  # Reward pool → queue of the indices of its idle workers.


def free_workers(ctx: Context) -> Free:
    free: dict[str, asyncio.Queue[int]] = {}
    for pool, group in ctx.rewards.items():
        places = free[pool] = asyncio.Queue()
        for index in range(len(group.workers)):
            places.put_nowait(index)
    return free


async def ask_reward(ctx: Context, group: list[Ticket], free: Free) -> Scores | None:
    """Scores a whole group by all trained terms; failures are retried.

    Terms with `required: false` that have no score are in `Scores.failed`. If a required term or all have none, the
    last failure or RewardError ends the run; for evaluations and with `reward.on_error=skip` the result is None. Raises
    RefLost.
    """
    config, first = ctx.config.reward, group[0]
    weights = {name: term.weight for name, term in config.terms.items()}
    scores = await ask_pools(ctx, ctx.reward_terms, group, free, weights)
    if first.kind == TRAIN:
        ctx.reward_calls.add(first.step, scores)
    fatal = required(ctx, scores) or (() if scores.by_term else tuple(scores.failed))
    if not fatal:
        return scores
    message = scores.failed[fatal[0]].reason
    if ends_run(ctx, group):
        raise RewardError(message)
    if first.kind == EVALUATION:
        ctx.warned.setdefault("unscored", f"an evaluated prompt has no score: {message}")
    ctx.observer.event("skipped", kind=first.kind, step=first.step, group=first.group, message=message)
    return None


async def ask_held_out(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Sets `held_out` of an evaluation's tickets to the scores by all held-out terms. Raises RefLost."""
    terms, first = ctx.config.evaluate.reward.terms, group[0]
    if first.kind != EVALUATION or not terms:
        return
    scores = await ask_pools(ctx, ctx.held_out_terms, group, free, dict.fromkeys(terms, 0.0))
    for name, failure in scores.failed.items():
        message = f"held-out {name}: {failure.reason}"
        ctx.observer.event("skipped", kind=first.kind, step=first.step, group=first.group, message=message)
    for ticket in group:
        ticket.held_out = scores


def required(ctx: Context, scores: Scores) -> tuple[str, ...]:
    terms = ctx.config.reward.terms
    return tuple(name for name in scores.failed if name in terms and terms[name].required)


def ends_run(ctx: Context, group: list[Ticket]) -> bool:
    """Returns True if a missing score of this group must end the run."""
    return ctx.config.reward.on_error == "fail" and group[0].kind == TRAIN


async def ask_pools(
    ctx: Context,
    pools: Mapping[str, Collection[str]],
    group: list[Ticket],
    free: Free,
    weights: Mapping[str, float],
) -> Scores:
    """Returns the group's scores by the terms of each of the `pools`. Raises RefLost once all calls have ended."""
    answers = await together(*(ask_pool(ctx, pool, terms, group, free[pool]) for pool, terms in pools.items()))
    for answer in answers:
        if isinstance(answer, RefLost):
            raise answer
    return combined(weights, [answer for answer in answers if isinstance(answer, Scores)])


async def ask_pool(
    ctx: Context, pool: str, terms: Collection[str], group: list[Ticket], places: asyncio.Queue[int]
) -> Scores | RefLost:
    """Returns the group's scores by one pool's terms, by calls of its next idle worker; RefLost is returned, too.

    Raises the last failure of a required term if it ends the run. Terms of a pool that is lost are in `failed`.
    """
    error_of_call: Exception | None = None
    images = [ticket.payload.images for ticket in group]

    async def ask(names: Sequence[str]) -> Scores:
        nonlocal error_of_call
        index, error_of_call = await places.get(), None
        try:
            if why := ctx.lost_pools.get(pool):
                return failing(names, why, final=True)
            return await score_once(ctx, pool, index, group, names, images)
        except FAILURES as error:
            error_of_call = error
            await reward_failed(ctx, pool, index, error)
            return failing(names, f"{type(error).__name__}: {error}")
        finally:
            places.put_nowait(index)

    try:
        scores = await asked_until_scored(terms, ctx.config.reward, ctx.servers, ask)
    except RefLost as lost:
        return lost
    if (fatal := required(ctx, scores)) and ends_run(ctx, group):
        failure = scores.failed[fatal[0]]
        reward_error = RewardError(failure.reason)
        reward_error.add_note(f"in the worker:\n{failure.traceback}")
        raise error_of_call or reward_error
    return scores


async def asked_until_scored(
    terms: Collection[str],
    config: RewardConfig,
    servers: RewardServers,
    ask: Callable[[Sequence[str]], Awaitable[Scores]],
) -> Scores:
    """Returns the results of `ask`, which is called again for the terms that failed, up to `reward.retries` times.

    A term is not asked again if its failure is final, or all of its servers are lost.
    """
    parts, names = list[Scores](), tuple(terms)
    for attempt in range(config.retries + 1):
        await servers.up(names)
        gone = {name: why for name, why in servers.lost().items() if name in names}
        parts += [failing([name], why, final=True) for name, why in gone.items()]
        if not (names := tuple(name for name in names if name not in gone)):
            break
        parts.append(await ask(names))
        names = tuple(name for name, failure in parts[-1].failed.items() if not failure.final)
        if not names or attempt == config.retries:
            break
        parts.append(Scores((), {}, retries=dict.fromkeys(names, 1)))
        await asyncio.sleep(config.backoff * 2**attempt)
    return combined(dict.fromkeys(terms, 0.0), parts)


def failing(terms: Sequence[str], reason: str, *, final: bool = False) -> Scores:
    return Scores((), {}, failed={name: Failure(reason, final=final) for name in terms})


async def score_once(
    ctx: Context, pool: str, index: int, group: list[Ticket], terms: Sequence[str], images: list[object]
) -> Scores:
    """Calls a worker for the terms. Raises DeadlineExceeded, WorkerDied, WorkerFailed or RefLost."""
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.state(worker.name, "busy")
    async with deadline(ctx.config.deadlines.score, f"score: {describe(group[0])} on {worker.name}"):
        scores: Scores = await worker.call("score", terms, ctx.requests.prompt(group[0]), *images)
    for span in scores.spans:
        ctx.observer.span(worker.name, span)
    for failure in scores.failed.values():
        ctx.observer.event("fault", worker=worker.name, kind="RewardError", message=failure.reason)
    ctx.observer.state(worker.name, "wait_data")
    return scores


async def reward_failed(ctx: Context, pool: str, index: int, error: Exception) -> None:
    """Records the failure of a call as an event; a worker that has died or exceeded its deadline is replaced.

    A pool for evaluations alone that gets no replacement is lost, and the run goes on.
    """
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
    if isinstance(error, WorkerFailed):
        ctx.observer.state(worker.name, "wait_data")
        return
    logger.warning("%s is lost: %s", worker.name, error)
    worker.kill()
    try:
        await ctx.rewards[pool].replace(index)
    except FAILURES as reason:
        if is_reward_pool(pool):
            raise
        ctx.lost_pools[pool] = f"its worker had no replacement: {type(reason).__name__}: {reason}"
        ctx.observer.event("fault", worker=worker.name, kind="PoolLost", message=ctx.lost_pools[pool])
