"""Host memory that a run needs in any case after its first steps: the basis of a refusal.

Only what certainly exists at the same time is counted, exactly: no margin, no activations, no buffers for versions that
may never be held, and no frozen weights, which on a CPU can be pages of a file that Linux reads again on demand.
"""

from async_flowrl.config.schema import Config
from async_flowrl.memory.host_memory import FLOAT32_BYTES, base_share, in_shares
from async_flowrl.memory.sizes import Sizes

SUM_BYTES = 8
"""Bytes of a number of the exact sum of the gradients."""


def least_of_rank(config: Config, model: Sizes, *, on_gpu: bool, sends: bool, copies: bool) -> int:
    """Returns the bytes that a trainer rank certainly needs; of a LoRA only a base that it offloads is counted.

    `sends` is for the rank that sends versions, `copies` for one that copies its state for a checkpoint, at least at
    the end of the run. With shares, these are bytes of a share, and the rank that sends has one whole version.
    """
    if not model.full:
        return base_share(config, model) if on_gpu and config.trainer.cpu_offload else 0
    kept, vector = kept_versions(config) * model.version_bytes, FLOAT32_BYTES * model.adapter_parameters
    whole = 3 * vector + kept if copies else 0  # the masters and both moments of Adam
    if not on_gpu:
        whole += 4 * vector + SUM_BYTES * model.adapter_parameters + kept  # the same, and the gradient
    elif sends and not in_shares(config):
        whole += kept
    if not in_shares(config):
        return whole
    return whole // config.trainer.num_workers + (model.version_bytes if sends else 0)


def least_of_rollout(config: Config, model: Sizes, *, on_gpu: bool) -> int:
    """Returns the bytes that a rollout worker of `placement=separate` certainly needs: versions, and the live one."""
    waiting = kept_versions(config) if config.versions_on_host or not on_gpu else 0
    return (waiting + (not on_gpu)) * model.version_bytes if model.full else 0


def kept_versions(config: Config) -> int:
    """Returns the number of versions that are kept at the same time once they have been made."""
    return min(config.live_versions, config.total_steps)
