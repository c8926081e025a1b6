"""Bytes of weights that lie in the object store while trainer ranks send them to rollout workers."""

from async_flowrl.config.schema import Config

MAX_BUCKETS_AHEAD = 4
"""Buckets that are fetched for a receiver while it puts another one in its place; at least one, else one per rank."""
MAX_KEPT_BUCKETS = 2 * MAX_BUCKETS_AHEAD
"""Buckets of one version that stay in the object store for receivers that ask for them a little later."""


def weights_in_store(config: Config, version_bytes: int, *, shares: bool) -> int:
    """Returns the most bytes of weights that lie in the object store at the same time in an undisturbed run.

    `version_bytes` are those of a whole version. `shares` means that each trainer rank sends its own share in buckets:
    then each of these counts as the buckets that are kept of it, and one in the hands of each rollout worker.

    - The canary. A whole one stays for workers that join later; the buckets of another one go when nobody takes it.
    - The version under way. In shares it counts twice: for workers that take it before it is sealed, and for others.
    - What is evaluated, at least at the end: the moving average (EMA), or without one a version of the policy again.

    Copies that a version has on further nodes are not counted, nor versions that still wait for a worker which takes
    longer than a step for one, or which joins while the run goes on.
    """
    if not shares:
        return 3 * version_bytes
    receivers = config.rollout.max_workers or config.rollout.num_workers
    buckets = (MAX_KEPT_BUCKETS + receivers) * config.checkpoint_engine.bucket_bytes
    return 4 * min(version_bytes, buckets)
