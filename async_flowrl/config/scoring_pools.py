"""The worker pools of a configuration: names of the two that every run has, and which reward workers score by what.

Reward terms share one pool; a term that sets workers, gpus_per_worker or threads has a pool of its own. Held-out terms
(`evaluate.reward.terms`), which score only evaluations, are scored by the first pool or have pools of their own, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from async_flowrl.config.schema import Config, RewardConfig, RewardTerm, ServeConfig

ROLLOUT, TRAINER = "rollout", "trainer"

# Name of the shared pool, and prefix of those of trained terms.
REWARD = "reward"
HELD_OUT = "held_out"
# Prefix of a pool's name → configuration section of its term.
SECTIONS = {REWARD: "reward.terms", HELD_OUT: "evaluate.reward.terms"}


@dataclass(frozen=True)
class RewardPool:
    """A pool of workers that score by the same terms: every group, or with held-out terms those of evaluations.

    `name` is `reward` for the shared pool, `reward/X` or `held_out/X` for the pool of the trained or held-out term X.
    """

    name: str
    terms: tuple[str, ...]
    workers: int
    gpus_per_worker: float
    threads: int

    def config(self, whole: RewardConfig) -> RewardConfig:
        """Returns the reward configuration with only this pool's trained terms, which its workers build; maybe none."""
        return replace(whole, terms={name: whole.terms[name] for name in self.terms if self.trained})

    @property
    def trained(self) -> bool:
        return is_reward_pool(self.name)


def reward_pools(config: RewardConfig) -> tuple[RewardPool, ...]:
    """Returns the shared pool, then the pools of single terms in the order of the configuration."""
    # The shared pool is missing if every term has its own. A value that a term leaves null is taken from the shared
    # pool.
    separate = {name: term for name, term in config.terms.items() if has_own_pool(term)}
    shared = tuple(name for name in config.terms if name not in separate)
    pools = [RewardPool(f"{REWARD}/{name}", (name,), *_seats(config, term)) for name, term in separate.items()]
    if shared or not separate:
        pools.insert(0, RewardPool(REWARD, shared, config.num_workers, config.gpus_per_worker, config.threads))
    return tuple(pools)


def scoring_pools(config: Config) -> tuple[RewardPool, ...]:
    """Returns the pools of `reward_pools`, then those of held-out terms that have one, in the configuration's order."""
    separate = ((name, term) for name, term in config.evaluate.reward.terms.items() if has_own_pool(term))
    pools = (RewardPool(f"{HELD_OUT}/{name}", (name,), *_seats(config.reward, term)) for name, term in separate)
    return *reward_pools(config.reward), *pools


def held_out_by_pool(config: Config) -> Mapping[str, Mapping[str, RewardTerm]]:
    """Returns pool → the held-out terms that it scores: the first pool those without a pool of their own."""
    terms = config.evaluate.reward.terms
    first = reward_pools(config.reward)[0].name
    pools = {name: f"{HELD_OUT}/{name}" if has_own_pool(term) else first for name, term in terms.items()}
    by_pool: dict[str, dict[str, RewardTerm]] = {}
    for name, pool in pools.items():
        by_pool.setdefault(pool, {})[name] = terms[name]
    return by_pool


def served_terms(config: Config) -> Iterator[tuple[str, ServeConfig]]:
    """Yields (term name, server settings) for the trained and the held-out terms; no name occurs in both."""
    for terms in (config.reward.terms, config.evaluate.reward.terms):
        for name, term in terms.items():
            if term.serve is not None:
                yield name, term.serve


def server_pool(term: str) -> str:
    return f"server/{term}"


def has_own_pool(term: RewardTerm) -> bool:
    return any(value is not None for value in (term.workers, term.gpus_per_worker, term.threads))


def is_reward_pool(pool: str) -> bool:
    return pool == REWARD or pool.startswith(f"{REWARD}/")


def is_scoring_pool(pool: str) -> bool:
    """Returns True if a pool of this name scores images, also if only those of evaluations."""
    return is_reward_pool(pool) or pool.startswith(f"{HELD_OUT}/")


def workers_key(pool: str) -> str:
    return f"{section_of(pool)}.{'num_workers' if pool == REWARD else 'workers'}"


def section_of(pool: str) -> str:
    prefix, _, term = pool.partition("/")
    return f"{SECTIONS[prefix]}.{term}" if term else pool


def _seats(config: RewardConfig, term: RewardTerm) -> tuple[int, float, int]:
    workers = config.num_workers if term.workers is None else term.workers
    gpus = config.gpus_per_worker if term.gpus_per_worker is None else term.gpus_per_worker
    return workers, gpus, config.threads if term.threads is None else term.threads
