"""Needs of a configuration: memory, disk space and object store, from the memory plan (memory/processes.py)."""

from dataclasses import dataclass

from async_flowrl.config.reward_pools import scoring_pools
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.sharding import in_shares
from async_flowrl.memory.host import KEPT_BY_CONTROLLER, PROCESS_BYTES, Process, training_processes
from async_flowrl.memory.processes import MemoryPlan, plan_memory

FOLDER_BYTES = 200_000_000
"""Size of a run directory without checkpoints: logs, metrics, images, report."""


@dataclass(frozen=True)
class Needs:
    """Needs of a whole run in bytes. `store` is the largest content of all object stores together."""

    processes: tuple[Process, ...]
    store: int
    run_directory: int
    model_files: int
    version: int
    """One version of the trained weights as it is sent to rollout workers."""

    @property
    def memory(self) -> int:
        """Host memory of all processes at the start of the run, without object stores and models of rewards."""
        return sum(process.total for process in self.processes)

    @property
    def largest(self) -> Process:
        """The pool whose processes need the most memory of one node."""
        return max(self.processes, key=lambda process: process.on_a_node)


def needs_of(config: Config, *, on_gpus: bool) -> Needs:
    """Returns the needs of a run. Raises ValueError if the model's shapes cannot be known without its weights."""
    plan = plan_memory(config)
    processes = [
        *training_processes(config, plan.model, on_gpus=on_gpus),
        *(Process(pool.name, pool.workers, PROCESS_BYTES) for pool in scoring_pools(config)),
        Process("controller", 1, PROCESS_BYTES + KEPT_BY_CONTROLLER * plan.snapshot * (config.tune != FULL)),
    ]
    return Needs(
        processes=tuple(processes),
        store=plan.payload,
        run_directory=run_directory_bytes(config, plan),
        model_files=model_bytes(config, plan),
        version=plan.adapter_bytes,
    )


def run_directory_bytes(config: Config, plan: MemoryPlan) -> int:
    """Returns the bytes of kept checkpoints, one more being written, a best one, both their weights, and more."""
    return (
        FOLDER_BYTES
        + (1 + (config.save.best is not None)) * plan.adapter_bytes
        + (config.save.keep + 1 + (config.save.best is not None)) * checkpoint_bytes(config, plan)
    )


def checkpoint_bytes(config: Config, plan: MemoryPlan) -> int:
    """Returns the bytes of a checkpoint, of all ranks' shares together."""
    return plan.snapshot * (config.trainer.num_workers if in_shares(config) else 1)


def model_bytes(config: Config, plan: MemoryPlan) -> int:
    """Returns the bytes of the pipeline's weights in the dtype used for computing."""
    model = plan.model
    return model.base_bytes + (model.text_parameters + model.vae_parameters) * model.itemsize
