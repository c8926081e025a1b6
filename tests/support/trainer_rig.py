"""A real policy, real rollouts and a real trainer rank, all tiny, for tests that hand groups to the trainer themselves.

`Sampler.group` makes a group by real rollouts, and `update` trains a `trainer` on groups.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive
from async_flowrl.tickets.request import sampling
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest, UpdateStats, merged
from async_flowrl.training.parts import cut
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.types import TRAIN, Prompt, RolloutRequest, Trajectory
from checkpoint_engine import Receiver, weights_digest

TEXTS = ("red red red red", "blue blue blue blue", "green green", "white")
Handed = tuple[GroupMeta, list[Trajectory]]
"""One group as the trainer gets it: its metadata, and one trajectory per ticket."""


def tiny_config(**trainer: Any) -> Config:
    """Returns a configuration of 2 prompts × 4 images, 4 denoising steps, and a LoRA of rank 4.

    `trainer` sets fields of the section `trainer`; AttributeError for an unknown one.
    """
    config = Config(prompts_per_step=2, group_size=4, max_staleness=1, total_steps=50)
    config.model.tiny.heads, config.model.tiny.layers = 4, 2
    config.rollout.num_inference_steps = 4
    config.lora.rank, config.lora.alpha = 4, 8.0
    config.reward.terms = {"color": RewardTerm()}
    config.trainer.micro_batch_size = 4
    config.trainer.learning_rate = 1e-2
    config.trainer.weight_decay = 0.0
    for name, value in trainer.items():
        if not hasattr(config.trainer, name):
            raise AttributeError(name)
        setattr(config.trainer, name, value)
    return config


def trainer(config: Config) -> TrainerWorker:
    worker = TrainerWorker(config, resolve_model(config.model), 0, "trainer-0")
    worker.load()
    return worker


class Sampler:
    """Generates groups with the weights that `load` has copied into its network."""

    def __init__(self, config: Config) -> None:
        self.config = config
        model = resolve_model(config.model)
        policy = load_policy(model, dtype=model.dtype, device="cpu", parts="all")
        tuning = tuning_of(config)
        tuning.attach(policy, config.seed)
        self.policy = policy
        self.engine = DiffusersEngine(policy, batch_size=None, device=torch.device("cpu"), tuning=tuning)

    def load(self, tensors: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, parameter in self.engine.live_tensors().items():
                parameter.copy_(torch.from_numpy(tensors[name]))

    def group(self, step: int, group: int, *, tickets: int = 1, **meta: Any) -> Handed:
        """Returns a group of `step`, cut into `tickets` tickets, with random seeded advantages of mean 0.

        `meta` replaces fields of its GroupMeta.
        """
        size = self.config.group_size // tickets
        trajectories = [self._ticket(step, group, range(i * size, (i + 1) * size)) for i in range(tickets)]
        drawn = np.random.default_rng([step, group]).standard_normal(self.config.group_size)
        values = {
            "group": group,
            "tickets": tickets,
            "version": step,
            "age": 0,
            "advantages": tuple((drawn - drawn.mean()).tolist()),
            "parts": cut(range(self.config.group_size), self.config.trainer.micro_batch_size),
            "seeds": tuple(derive(self.config.seed, "row", step, group, i) for i in range(self.config.group_size)),
            "negative": self.config.rollout.negative_prompt,
            "sampling": sampling(self.config),
        }
        return GroupMeta(**{**values, **meta}), trajectories

    def _ticket(self, step: int, group: int, images: range) -> Trajectory:
        config = self.config
        window = draw_window(
            config.algorithm,
            num_inference_steps=config.rollout.num_inference_steps,
            seed=config.seed,
            step=step,
            group=group,
        )
        request = RolloutRequest(
            kind=TRAIN,
            ordinal=group,
            step=step,
            group=group,
            version=step,
            prompt=Prompt(group, TEXTS[group % len(TEXTS)]),
            images=tuple(images),
            initial_seeds=tuple(derive(config.seed, "initial", step, group, i) for i in images),
            noise_seeds=tuple(derive(config.seed, "noise", step, group, i) for i in images),
            noise_steps=window.noise_steps,
            train_steps=window.train_steps,
            sampling=sampling(config),
        )
        trajectory = self.engine.generate([request])[0].trajectory
        assert trajectory is not None
        return read_only(trajectory)

    def negatives(self) -> dict[str, Any]:
        text = self.config.rollout.negative_prompt
        return {text: self.engine.encode([text])[0]}


class Site:
    """A sampler with the receiving end of the weights."""

    def __init__(self, config: Config, sampler: Sampler | None = None) -> None:
        self.sampler = sampler or Sampler(config)
        self.sampler.policy.transformer.requires_grad_(False)
        lora: dict[str, Any] = {} if config.tune == "full" else {"alpha": config.lora.alpha, "rank": config.lora.rank}
        self.receiver = Receiver(self.sampler.engine.live_tensors(), capacity=config.live_versions, **lora)

    def receive(self, worker: TrainerWorker, version: int) -> None:
        worker.sender.policy.seal(version)
        header, data = worker.sender.policy.payload(version)
        self.receiver.receive(header, data.copy())
        self.receiver.activate("policy", version)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.sampler.engine.live_tensors().items()}


def read_only(trajectory: Trajectory) -> Trajectory:
    """Returns a copy whose arrays are read-only, as they are when they come out of Ray's object store."""
    trajectory = deepcopy(trajectory)  # The engine's cache has the arrays of the conditioning, too.
    arrays = (trajectory.latents, trajectory.log_probs, trajectory.sigmas, *trajectory.conditioning.values())
    for array in arrays:
        array.flags.writeable = False
    return trajectory


def rows(handed: list[Handed]) -> int:
    return sum(len(meta.selected) * len(tickets[0].train_steps) for meta, tickets in handed)


def recut(config: Config, handed: list[Handed]) -> list[Handed]:
    """Returns the groups cut into parts by this configuration, as its controller would cut them."""
    samples = config.trainer.micro_batch_size
    return [(replace(meta, parts=cut(meta.selected, samples)), tickets) for meta, tickets in handed]


def update(
    worker: TrainerWorker, step: int, handed: list[Handed], *, plan: StepPlan | None = None, together: bool = False
) -> UpdateStats:
    """Does one optimizer step on the groups, given one by one, or all in one call with `together`."""
    worker.update.begin(step, plan or StepPlan(rows=rows(handed)))
    handed = recut(worker.config, handed)
    if together:
        worker.update.accumulate([meta for meta, _ in handed], *[t for _, tickets in handed for t in tickets])
    else:
        for meta, tickets in handed:
            worker.update.accumulate([meta], *tickets)
    return finish(worker)


def finish(worker: TrainerWorker) -> UpdateStats:
    """Does the optimizer step on the accumulated gradients and returns its statistics."""
    assert worker.add_up(TrainRequest(0, ())) is None
    return merged([worker.take_step()])


def gradient(worker: TrainerWorker) -> torch.Tensor:
    """Returns the mean gradient accumulated so far, [numel] float32, without doing the optimizer step."""
    out = torch.empty_like(worker.parameters.gradients)
    worker.update.sum.mean(out, worker.update.plan.rows)
    return out


def gradient_of(config: Config, handed: list[Handed], *, over: int | None = None) -> torch.Tensor:
    """Returns the mean gradient of the groups at the initial weights, [numel] float32; `over`: of so many rows."""
    worker = trainer(config)
    worker.update.begin(0, StepPlan(rows=over or rows(handed)))
    for meta, tickets in recut(config, handed):
        worker.update.accumulate([meta], *tickets)
    return gradient(worker)


def weights(worker: TrainerWorker, *, average: bool = False) -> dict[str, np.ndarray]:
    """Returns name → trained weights, float32; with `average` their EMA."""
    flat = worker.versions.ema if average else worker.parameters.values.data
    assert flat is not None
    return {name: tensor.to("cpu", copy=True).numpy() for name, tensor in worker.parameters.named(flat).items()}


def digest(worker: TrainerWorker) -> str:
    """Returns the digest of the trained weights as a checkpoint has it."""
    return weights_digest(worker.parameters.named(worker.parameters.values.data))


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def with_advantages(handed: Handed, advantages: list[float]) -> Handed:
    return replace(handed[0], advantages=tuple(advantages)), handed[1]
