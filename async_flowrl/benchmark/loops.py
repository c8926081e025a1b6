"""Measures G and T: the seconds of generation and of training per step when nothing but the model runs.

Each is the bare loop of bare.py in a process of its own, alone and beside the other one. The bound max(G, T) uses the
loops that run side by side: they never wait for each other but share the machine, as the pools do.
"""

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.table import TRAIN, Ticket

ROLES = ("rollout", "trainer")
MAX_START_SECONDS = 300.0
"""Time limit for loading the model and the first step, which is not measured."""


@dataclass(frozen=True)
class Loops:
    """Seconds per step on one device, both loops side by side; `…_alone` is None if that was not measured."""

    generation: float
    update: float
    generation_alone: float | None = None
    update_alone: float | None = None

    @property
    def contention(self) -> tuple[float, float] | None:
        """Factors by which generation and training are slower beside each other than alone; None if not measured."""
        if self.generation_alone is None or self.update_alone is None:
            return None
        return self.generation / self.generation_alone, self.update / self.update_alone


def measure(config: Config, *, seconds: float, alone: bool = True) -> Loops:
    """Measures both loops side by side and then, with `alone`, each by itself, for `seconds` each.

    Raises ValueError for settings that the bare loop lacks, TimeoutError if a loop does not answer, and RuntimeError if
    its process dies.
    """
    (together,) = side_by_side([config], seconds=seconds)
    if not alone:
        return together
    apart = {role: run([config], [role], seconds)[role][0] for role in ROLES}
    return Loops(together.generation, together.update, apart["rollout"], apart["trainer"])


def side_by_side(configs: Sequence[Config], *, seconds: float) -> list[Loops]:
    """Measures both loops side by side, one configuration after another, in one pair of processes."""
    for config in configs:
        if config.rollout.true_cfg_scale > 1:
            raise ValueError(
                f"the bare loop has no guidance: rollout.true_cfg_scale must be 1, got {config.rollout.true_cfg_scale}"
            )
    medians = run(configs, ROLES, seconds)
    return [Loops(*pair) for pair in zip(medians["rollout"], medians["trainer"], strict=True)]


def run(configs: Sequence[Config], roles: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """Returns, per role, the median seconds per step for each configuration, which all roles start together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(roles))
    pipes = [context.Pipe(duplex=False) for _ in roles]
    processes = [
        context.Process(target=work, args=(configs, role, seconds, barrier, pipe[1]), daemon=True)
        for role, pipe in zip(roles, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    patience = MAX_START_SECONDS + 10 * seconds * len(configs)
    try:
        return {role: receive(role, pipe[0], patience) for role, pipe in zip(roles, pipes, strict=True)}
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


class LoopFailed(RuntimeError):
    """A bare loop's process died, or did not answer in time."""


def receive(role: str, pipe: "multiprocessing.connection.Connection[Any, Any]", patience: float) -> list[float]:
    if not pipe.poll(patience):
        raise LoopFailed(f"the bare {role} loop did not answer within {patience:g} s")
    try:
        return [float(value) for value in pipe.recv()]
    except EOFError:
        raise LoopFailed(f"the bare {role} loop died; its message is above") from None


def work(configs: Sequence[Config], role: str, seconds: float, barrier: Any, answer: Any) -> None:
    """Body of a loop's process: for each configuration it loads, makes one step, waits for the others, and measures."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    import torch

    if torch.cuda.is_available():
        index = ROLES.index(role) % torch.cuda.device_count()
        torch.set_default_device(f"cuda:{index}")
    medians = []
    for config in configs:
        torch.set_num_threads(config.rollout.threads if role == "rollout" else config.trainer.threads)
        medians.append(timed(step_of(config, role), seconds, barrier))
    answer.send(medians)
    barrier.wait(MAX_START_SECONDS)


def timed(step: Callable[[], Any], seconds: float, barrier: Any) -> float:
    """Median seconds of a step, over at least three steps and `seconds` seconds, begun with the other loops."""
    step()
    barrier.wait(MAX_START_SECONDS)
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 3:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    barrier.wait(MAX_START_SECONDS)
    return median(times)


def step_of(config: Config, role: str) -> Any:
    """Returns a function that does one training step's work of the role and returns when the device has finished."""
    import torch

    from async_flowrl.benchmark.bare import Bare
    from async_flowrl.policies.loading import quiet
    from async_flowrl.policies.lora import targeted_modules
    from async_flowrl.policies.registry import DTYPES, load_policy

    prepared = prepare(config)
    policy = load_policy(prepared.model, dtype=prepared.model.dtype, device="cpu", parts="transformer")
    targets = targeted_modules(policy.transformer, config.lora, policy)
    rollout, n, count = config.rollout, config.group_size, trained_steps(config)
    if len(prepared.sizes) > 1 or not isinstance(prepared.sizes[0], int):
        raise ValueError("the bare loop makes square images of one size: give one integer as rollout.resolution")
    with quiet():
        bare = Bare(
            prepared.model.path,
            side=prepared.sizes[0],
            steps=rollout.num_inference_steps,
            targets=targets,
            rank=config.lora.rank,
            dtype=DTYPES[prepared.model.dtype],
        )
    tickets = [Ticket(TRAIN, group, 0, group, 0, 0) for group in range(config.prompts_per_step)]
    texts = [prepared.requests.prompt(ticket).text for ticket in tickets]

    def generate() -> Any:
        return [bare.generate(text, n)[1] for text in texts]

    groups = generate()
    at_once = config.trainer.timesteps_per_forward or count

    def train() -> None:
        bare.update(groups, trained=count, at_once=at_once)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return generate if role == "rollout" else train
