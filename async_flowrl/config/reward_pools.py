"""The pools that the terms of a reward are scored in, by the configuration alone."""

from dataclasses import dataclass, replace

from async_flowrl.config.schema import RewardConfig, RewardTerm

SHARED = "reward"
"""Name of the pool of all terms that have none of their own."""


@dataclass(frozen=True)
class RewardPool:
    """Workers that score every group by some of the terms, and the settings that say how many of them there are."""

    name: str
    """`reward`, or `reward/X` for the pool of the term X alone."""
    terms: tuple[str, ...]
    workers: int
    gpus_per_worker: float
    threads: int

    @property
    def section(self) -> str:
        """Of the configuration, with the keys `gpus_per_worker` and `threads`."""
        return SHARED if self.name == SHARED else f"reward.terms.{self.terms[0]}"

    @property
    def workers_key(self) -> str:
        """The setting that `workers` comes from."""
        return workers_key(self.name)

    def config(self, whole: RewardConfig) -> RewardConfig:
        """What its workers build: the reward with only this pool's terms."""
        return replace(whole, terms={name: whole.terms[name] for name in self.terms})


def reward_pools(config: RewardConfig) -> tuple[RewardPool, ...]:
    """The shared pool, where a term is left to it (or there is no term at all), then those of single terms, in order.

    What a term with a pool of its own leaves null is as in the shared pool.
    """
    own = {name: term for name, term in config.terms.items() if has_own_pool(term)}
    left = tuple(name for name in config.terms if name not in own)
    pools = [RewardPool(pool_name(name), (name,), *_seats(config, term)) for name, term in own.items()]
    if left or not own:
        pools.insert(0, RewardPool(SHARED, left, config.num_workers, config.gpus_per_worker, config.threads))
    return tuple(pools)


def has_own_pool(term: RewardTerm) -> bool:
    """Whether the term says anything about workers of its own."""
    return any(value is not None for value in (term.workers, term.gpus_per_worker, term.threads))


def is_reward_pool(pool: str) -> bool:
    """Whether a pool of that name scores images."""
    return pool == SHARED or pool.startswith(f"{SHARED}/")


def pool_name(term: str) -> str:
    """Name of the pool that a term has of its own."""
    return f"{SHARED}/{term}"


def workers_key(pool: str) -> str:
    """The setting that says how many workers a reward pool has."""
    term = pool.removeprefix(f"{SHARED}/")
    return f"{SHARED}.num_workers" if pool == SHARED else f"{SHARED}.terms.{term}.workers"


def _seats(config: RewardConfig, term: RewardTerm) -> tuple[int, float, int]:
    return (
        config.num_workers if term.workers is None else term.workers,
        config.gpus_per_worker if term.gpus_per_worker is None else term.gpus_per_worker,
        config.threads if term.threads is None else term.threads,
    )
