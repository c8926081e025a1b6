"""The reward pools of a configuration: which workers score by which reward terms.

Terms share one pool; a term that sets workers, gpus_per_worker or threads has a pool of its own.
"""

from dataclasses import dataclass, replace

from async_flowrl.config.schema import RewardConfig, RewardTerm

SHARED = "reward"
"""Name of the shared pool, and prefix of the others."""


@dataclass(frozen=True)
class RewardPool:
    """A pool of workers that score every group by the same terms."""

    name: str
    """`reward` for the shared pool, or `reward/X` for the pool of the term X."""
    terms: tuple[str, ...]
    workers: int
    gpus_per_worker: float
    threads: int

    @property
    def section(self) -> str:
        """Returns the configuration section with the pool's `gpus_per_worker` and `threads`."""
        return SHARED if self.name == SHARED else f"reward.terms.{self.terms[0]}"

    @property
    def workers_key(self) -> str:
        """Returns the key of the setting for the number of workers."""
        return workers_key(self.name)

    def config(self, whole: RewardConfig) -> RewardConfig:
        """Returns the reward configuration with only this pool's terms, from which its workers build their rewards."""
        return replace(whole, terms={name: whole.terms[name] for name in self.terms})


def reward_pools(config: RewardConfig) -> tuple[RewardPool, ...]:
    """Returns the shared pool, then the pools of single terms in the order of the configuration.

    The shared pool is missing if every term has its own. A value that a term leaves null is taken from the shared pool.
    """
    own = {name: term for name, term in config.terms.items() if has_own_pool(term)}
    left = tuple(name for name in config.terms if name not in own)
    pools = [RewardPool(pool_name(name), (name,), *_seats(config, term)) for name, term in own.items()]
    if left or not own:
        pools.insert(0, RewardPool(SHARED, left, config.num_workers, config.gpus_per_worker, config.threads))
    return tuple(pools)


def has_own_pool(term: RewardTerm) -> bool:
    """Returns True if the term sets workers, gpus_per_worker or threads."""
    return any(value is not None for value in (term.workers, term.gpus_per_worker, term.threads))


def is_reward_pool(pool: str) -> bool:
    """Returns True if a pool of this name scores images."""
    return pool == SHARED or pool.startswith(f"{SHARED}/")


def pool_name(term: str) -> str:
    """Returns the name of a term's own pool."""
    return f"{SHARED}/{term}"


def workers_key(pool: str) -> str:
    """Returns the key of the setting for the number of workers of a reward pool."""
    term = pool.removeprefix(f"{SHARED}/")
    return f"{SHARED}.num_workers" if pool == SHARED else f"{SHARED}.terms.{term}.workers"


def _seats(config: RewardConfig, term: RewardTerm) -> tuple[int, float, int]:
    return (
        config.num_workers if term.workers is None else term.workers,
        config.gpus_per_worker if term.gpus_per_worker is None else term.gpus_per_worker,
        config.threads if term.threads is None else term.threads,
    )
