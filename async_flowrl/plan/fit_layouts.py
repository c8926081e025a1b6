"""Layouts that `plan --fit` tries for a recipe: workers of every pool, and settings that save memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from async_flowrl.config.reward_pools import HELD_OUT, SHARED, scoring_pools, workers_key
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.config.shared import SHARED as ONE_POOL
from async_flowrl.memory.seats import gpus_taken
from async_flowrl.rewards.served import served_terms

Staff = Mapping[str, int]
"""Reward pool of a single term that has GPUs (`reward/X`, `held_out/X`) → its workers."""


def candidates(words: Sequence[str], plain: Config, devices: int) -> Iterator[list[str]]:
    """Yields the arguments of `async-flowrl train` to try: for each layout the plain recipe, then with more savings.

    `words` are the overrides that make the recipe, whose configuration is `plain`.
    """
    for staff in staffs(plain):
        for layout in layouts(words, plain, devices, staff):
            saved: list[str] = []
            yield layout
            for saving in savings(plain):
                saved.append(saving)
                yield [*layout, *saved]


def staffs(config: Config) -> Iterator[Staff]:
    """Yields the workers of each reward pool of a single term: first as configured, then one per pool.

    One worker per pool is slower but needs fewer GPUs.
    """
    configured = {p.name: p.workers for p in scoring_pools(config) if p.name != SHARED and p.gpus_per_worker > 0}
    yield configured
    if any(count > 1 for count in configured.values()):
        yield dict.fromkeys(configured, 1)


def layouts(words: Sequence[str], config: Config, devices: int, staff: Staff) -> Iterator[list[str]]:
    """Yields the arguments for each split of the devices into rollout and trainer workers, even splits first.

    The reward pools of `staff` and the reward servers get their GPUs first; trainer and rollout get all that are left.
    The last layout has `placement=shared`, with as many processes as fit. A layout with a single process is tried only
    if no smaller `staff` follows or if `shared` is the recipe's own placement, which then has no other layout. With
    `devices` of 1, all pools share that device.
    """
    if devices == 1:
        yield from _one_device(words, config, staff)
        return
    if config.placement != ONE_POOL:
        for trainer, rollout in splits(config, devices, staff):
            yield ["--config-name one_step_off", *words, *_counts(config, trainer, rollout, staff)]
    together = replace(config, placement=ONE_POOL)
    fewest = 1 if config.placement == ONE_POOL or max(staff.values(), default=1) == 1 else 2
    for each in range(devices, fewest - 1, -1):
        if gpus_taken(with_workers(together, each, each, staff)) <= devices:
            yield _shared(words, config, _counts(config, each, each, staff))
            return


def splits(config: Config, devices: int, staff: Staff) -> list[tuple[int, int]]:
    """Returns (trainer ranks, rollout workers) that fit the devices and leave no room for one more, even splits first.

    The shared reward pool has as many workers as the rollout pool. So if its workers have whole GPUs, the sum of
    trainer and rollout devices differs between splits.
    """

    def fits(trainer: int, rollout: int) -> bool:
        return gpus_taken(with_workers(config, trainer, rollout, staff)) <= devices

    fitting = {
        (trainer, rollout)
        for trainer in range(1, devices)
        for rollout in range(1, devices - trainer + 1)
        if fits(trainer, rollout)
    }
    largest = [(t, r) for t, r in fitting if (t + 1, r) not in fitting and (t, r + 1) not in fitting]
    return sorted(largest, key=lambda split: (-min(split), -sum(split), split))


def savings(config: Config) -> Iterator[str]:
    """Yields settings that reduce memory, in the order in which they are added."""
    yield "rollout.text_encoder=cached"
    yield "rollout.batch_size=1"
    if config.trainer.gradient_checkpointing != "full":
        yield "trainer.gradient_checkpointing=full"
    yield "trainer.micro_batch_size=1"
    yield "trainer.shard=full"
    yield "trainer.cpu_offload=true"


def with_workers(config: Config, trainer: int, rollout: int, staff: Staff) -> Config:
    """Returns the configuration with these numbers of workers; the shared reward pool has as many as rollout has."""

    def staffed(terms: Mapping[str, RewardTerm], prefix: str) -> dict[str, RewardTerm]:
        return {
            name: replace(term, workers=staff.get(f"{prefix}/{name}", term.workers)) for name, term in terms.items()
        }

    held_out = replace(config.evaluate.reward, terms=staffed(config.evaluate.reward.terms, HELD_OUT))
    return replace(
        config,
        trainer=replace(config.trainer, num_workers=trainer),
        rollout=replace(config.rollout, num_workers=rollout),
        reward=replace(config.reward, num_workers=rollout, terms=staffed(config.reward.terms, SHARED)),
        evaluate=replace(config.evaluate, reward=held_out),
    )


def _one_device(words: Sequence[str], config: Config, staff: Staff) -> Iterator[list[str]]:
    """Yields the arguments for one device, of which each reward pool and server has its share, if any.

    One process samples and trains on all that is left (`placement=shared`).
    """
    pools = scoring_pools(with_workers(config, 1, 1, staff))
    seated = sum(pool.workers * pool.gpus_per_worker for pool in pools)
    seated += sum(serve.gpus * serve.replicas for _, serve in served_terms(config))
    if seated >= 1:
        return
    given = [*_numbers(1), *_staff(config, 1, staff)]
    given += [f"{pool}.gpus_per_worker={1 - seated:g}" for pool in ("trainer", "rollout")] if seated else []
    yield _shared(words, config, given)


def _shared(words: Sequence[str], config: Config, given: Sequence[str]) -> list[str]:
    placement = [] if config.placement == ONE_POOL else [f"placement={ONE_POOL}"]
    return ["--config-name one_step_off", words[0], *placement, *words[1:], *given]


def _numbers(workers: int) -> list[str]:
    return [f"{pool}.num_workers={workers}" for pool in ("rollout", "trainer", "reward")]


def _counts(config: Config, trainer: int, rollout: int, staff: Staff) -> list[str]:
    """Returns the settings of numbers of workers that are not the recipe's own."""
    given = {
        "rollout.num_workers": (rollout, config.rollout.num_workers),
        "trainer.num_workers": (trainer, config.trainer.num_workers),
        "reward.num_workers": (rollout, config.reward.num_workers),
    }
    counts = [f"{key}={value}" for key, (value, usual) in given.items() if value != usual]
    return [*counts, *_staff(config, rollout, staff)]


def _staff(config: Config, shared: int, staff: Staff) -> list[str]:
    """Returns the settings of `staff` that differ from the recipe with `shared` workers in the shared reward pool."""
    now = replace(config, reward=replace(config.reward, num_workers=shared))
    return [
        f"{workers_key(pool.name)}={staff[pool.name]}"
        for pool in scoring_pools(now)
        if pool.name in staff and pool.workers != staff[pool.name]
    ]
