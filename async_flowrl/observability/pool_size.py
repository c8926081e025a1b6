"""The pools of a run: how many workers the configuration gives them, and how many an elastic rollout pool had."""

from collections.abc import Iterable

from async_flowrl.config.pools import scoring_pools
from async_flowrl.config.schema import Config
from async_flowrl.observability.events import Event
from async_flowrl.observability.ledger import place_of, pool_of
from async_flowrl.rewards.served import served_terms, server_pool

CHANGES = ("worker_joined", "worker_left")


def configured_pools(config: Config) -> dict[str, tuple[int, float]]:
    """Returns pool → (workers, GPUs of each) as configured; the servers of a term with `serve` are a pool, too."""
    return {
        "rollout": (config.rollout.num_workers, config.rollout.gpus_per_worker),
        "trainer": (config.trainer.num_workers, config.trainer.gpus_per_worker),
        **{pool.name: (pool.workers, pool.gpus_per_worker) for pool in scoring_pools(config)},
        **{server_pool(term): (serve.replicas, serve.gpus) for term, serve in served_terms(config)},
    }


def rollout_size(config: Config, attempt: Iterable[Event]) -> dict[str, int]:
    """Returns the numbers of rollout workers that `joined` and `left` in the last attempt, and were there at a time.

    `fewest` and `most` are the smallest and the largest number of workers that served at the same time.

    A newcomer that was turned away is not counted.
    """
    present: set[str] = set()
    changes: list[Event] = []
    for event in attempt:
        if event["event"] in CHANGES:
            changes.append(event)
        elif _of_the_start(event) and not changes:
            present.add(place_of(event["worker"]))
    counts = [len(present) or config.rollout.num_workers]
    if changes:
        counts = [changes[0]["workers"] + (1 if changes[0]["event"] == "worker_left" else -1)]
    counts += [event["workers"] for event in changes]
    return {
        "joined": sum(event["event"] == "worker_joined" for event in changes),
        "left": sum(event["event"] == "worker_left" for event in changes),
        "fewest": min(counts),
        "most": max(counts),
    }


def _of_the_start(event: Event) -> bool:
    """Returns True if the event names a rollout worker of the start, or a replacement."""
    return event["event"] == "worker" and pool_of(event["worker"]) == "rollout" and not event.get("newcomer")


def places(attempt: Iterable[Event]) -> int:
    """Returns the number of places of the rollout pool that ever had a worker in the attempt; at least 1."""
    named = {place_of(event["worker"]) for event in attempt if event["event"] == "worker"}
    return max(1, sum(pool_of(place) == "rollout" for place in named))
