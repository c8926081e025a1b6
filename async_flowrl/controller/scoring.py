"""The scores of a group: every pool of reward workers scores it by its own terms, all of them side by side."""

import asyncio
from collections.abc import Mapping, Sequence

from async_flowrl.config.reward_pools import reward_pools
from async_flowrl.controller.context import Context, Servers, book_span
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.combine import combined
from async_flowrl.tickets.table import TRAIN, Ticket, describe
from async_flowrl.types import Failure, Scores
from separation.group import RefLost, WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded, deadline, together

FAILURES = (WorkerDied, WorkerFailed, DeadlineExceeded)
"""What a call of a reward worker may end with, and be made again."""

Free = Mapping[str, asyncio.Queue[int]]
"""Per reward pool the places whose workers have no group."""


def free_workers(ctx: Context) -> Free:
    """All places of all reward pools."""
    free: dict[str, asyncio.Queue[int]] = {}
    for pool, group in ctx.rewards.items():
        places = free[pool] = asyncio.Queue()
        for index in range(len(group.workers)):
            places.put_nowait(index)
    return free


async def ask_reward(ctx: Context, group: list[Ticket], free: Free) -> Scores | None:
    """One call per pool for the whole group, each on the pool's next free worker; what fails is retried with back-off.

    Terms with `required: false` that cannot be had are in `failed`. None if a required term cannot be had, or no term
    at all, and `reward.on_error` is `skip` or the group is an evaluation's, which ends no run. Raises RefLost, and the
    last failure.
    """
    answers = await together(*(ask_pool(ctx, pool, group, free[pool]) for pool in ctx.rewards))
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
    """The terms that failed and that a reward needs."""
    terms = ctx.config.reward.terms
    return tuple(name for name in scores.failed if terms[name].required)


def ends_run(ctx: Context, group: list[Ticket]) -> bool:
    """Whether the run ends where a score of the group cannot be had."""
    return ctx.config.reward.on_error == "fail" and group[0].kind == TRAIN


async def ask_pool(ctx: Context, pool: str, group: list[Ticket], places: asyncio.Queue[int]) -> Scores | RefLost:
    """The group's scores by one pool's terms; those that failed for good are in `failed`.

    A term that fails is asked of the next free worker again, as often as `reward.retries` says, unless the worker has
    done so itself. Raises the last failure of a required term where it ends the run. Lost images are returned: the
    other pools' calls must end before the group is made again.
    """
    config = ctx.config.reward
    images = [ticket.payload[0] for ticket in group]
    parts: list[Scores] = []
    terms = next(each.terms for each in reward_pools(config) if each.name == pool)
    only: tuple[str, ...] | None = None
    for attempt in range(config.retries + 1):
        await ctx.servers.up(terms)
        if gone := without_server(ctx.servers, only or terms):
            parts.append(gone)
            only = tuple(name for name in only or terms if name not in gone.failed)
            if not only:
                break
        index, lost = await places.get(), None
        try:
            parts.append(await score_once(ctx, pool, index, group, only, images))
        except RefLost as gone:
            return gone
        except FAILURES as error:
            lost = error
            parts.append(without(only or terms, error))
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
        raise lost or said_in_worker(scores.failed[fatal[0]])
    return scores


def without_server(servers: Servers, terms: Sequence[str]) -> Scores | None:
    """The failure of those of the terms that have no server any more; None where there is none to ask in vain."""
    failed = {name: Failure(why, final=True) for name, why in servers.lost().items() if name in terms}
    return Scores((), {}, failed=failed) if failed else None


def without(terms: Sequence[str], error: Exception) -> Scores:
    """What a call that failed as a whole says of the terms that it was asked for."""
    return Scores((), {}, failed={name: Failure(str(error)) for name in terms})


def said_in_worker(failure: Failure) -> RewardError:
    """The error of a term, with where it was raised."""
    error = RewardError(failure.reason)
    error.add_note(f"in the worker:\n{failure.traceback}")
    return error


async def score_once(
    ctx: Context, pool: str, index: int, group: list[Ticket], only: Sequence[str] | None, images: list[object]
) -> Scores:
    """One call for the named terms, for all of the pool's if None; the failures of terms are booked."""
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.state(worker.name, "busy")
    what = f"score: {describe(group[0])} on {worker.name}"
    prompt = ctx.requests.prompt(group[0])
    call = ("score", prompt) if only is None else ("score_terms", only, prompt)
    async with deadline(ctx.config.deadlines.score, what):
        scores: Scores = await worker.call(*call, *images)
    ctx.servers.heard(scores.served)
    for span in scores.spans:
        book_span(ctx.observer, worker.name, span)
    for failure in scores.failed.values():
        ctx.observer.event("fault", worker=worker.name, kind="RewardError", message=failure.reason)
    ctx.observer.state(worker.name, "wait_data")
    return scores


async def reward_failed(ctx: Context, pool: str, index: int, error: Exception) -> None:
    """Books the failure; a worker that is gone, or as good as gone, is replaced."""
    worker = ctx.rewards[pool].workers[index]
    ctx.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
    if not isinstance(error, WorkerFailed):
        worker.kill()
        await ctx.rewards[pool].replace(index)
