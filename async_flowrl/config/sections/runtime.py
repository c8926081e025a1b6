"""The sections `runtime`, `hardware`, `deadlines` and `limits` of the configuration: the machines, and their limits."""

from dataclasses import dataclass

from async_flowrl.config.settings import setting


@dataclass
class HardwareConfig:
    """Facts about the devices that the run cannot find out."""

    peak_tflops: float | None = setting(None, above=0)
    """Dense TFLOP/s of one worker's device in model.dtype, from which MFU is computed; null = known values by the name
    of an NVIDIA device."""


@dataclass
class DeadlinesConfig:
    """Seconds that each phase may take. After that its worker is given up, or the run ends and names what was late."""

    download: float = setting(7200.0, above=0, infinite=True)
    """Seconds until every node has the model's files, which one worker of each node fetches from the hub."""
    load: float = setting(900.0, above=0, infinite=True)
    """Seconds until a new worker has its model and serves."""
    generate: float = setting(600.0, above=0, infinite=True)
    """Seconds for the images of one ticket. With placement=shared without the time that it waits for training: the
    worker is asked, and one that hangs is found within twice as long for each of its tickets."""
    score: float = setting(300.0, above=0, infinite=True)
    """Seconds for the rewards of one group."""
    publish: float = setting(120.0, above=0, infinite=True)
    """Seconds for one delivery of weights. With tune=full and trainer.shard=full: for each answer of a trainer rank,
    and for all that one rollout worker does with one version; it does not pay for its waits for ranks."""
    update: float = setting(1800.0, above=0, infinite=True)
    """Seconds for one group's share of an update, for its end, or for writing a checkpoint. With placement=shared, a
    call to train may take 5 * deadlines.generate * rollout.tickets_per_batch longer, because it waits for the ticket
    under way, and that may have to be found hanging first."""
    stall: float = setting(60.0, above=0, infinite=True)
    """Seconds without any change after which the controller's log says which tickets wait for what."""


@dataclass
class LimitsConfig:
    """Numbers of failures of one kind, and what happens when there are more."""

    ticket_attempts: int = setting(6, at_least=1)
    """Attempts at one ticket. If all are lost, the run ends, because the ticket itself probably kills its workers."""
    workers_lost_in_a_row: int = setting(4, at_least=0, at_most=10)
    """Workers that one place of the rollout pool, such as rollout-0, may lose in a row without a finished ticket; one
    more ends the run. The pause before the n-th is replaced is 2^(n-1) - 1 seconds."""
    recoveries: int = setting(3, at_least=0)
    """Recoveries of the run from the death of a trainer rank, in a row without a step that had not been trained before;
    the next such death ends it."""
    missed_checkpoints: int = setting(3, at_least=1)
    """Checkpoints in a row that could not be written after which the run ends; fewer are warnings."""


@dataclass
class RuntimeConfig:
    """The place where the workers run."""

    backend: str = setting("ray", choices=("ray", "local"))
    """ray (separate processes) or local (threads in this process, for tests and debugging)."""
    address: str | None = None
    """Address of a Ray cluster; null starts one on this machine."""
    numa_binding: bool = False
    """Keep each worker that has a GPU, and its threads, on the CPUs of the GPU's NUMA node; the log names them."""
