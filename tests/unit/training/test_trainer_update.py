"""Tests of one rank's optimizer step against a loop written out by hand, and of the rules around it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction
from async_flowrl.algorithms.flow_grpo import FlowGRPO
from async_flowrl.config.schema import AlgorithmConfig, Config
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.messages import StepPlan, TrainRequest
from async_flowrl.training.parts import cut
from tests.support import trainer_rig as rig
from tests.support.tiny import tensors


def bare_loop(config: Config, batches: list[list[rig.Handed]]) -> dict[str, np.ndarray]:
    """Flow-GRPO with plain torch: no flat vector, no micro-batch objects, no phases."""
    policy = load_policy(resolve_model(config.model), dtype="float32", device="cpu", parts="transformer")
    add_lora(policy.transformer, config.lora, policy, config.seed)
    parameters = lora_parameters(policy.transformer)
    settings = config.trainer
    adam = torch.optim.AdamW(
        parameters.values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for batch in batches:
        total = rig.rows(batch)
        for meta, (trajectory,) in batch:
            condition = {k: torch.tensor(v) for k, v in trajectory.conditioning.items()}
            sigmas, latents = torch.tensor(trajectory.sigmas), torch.tensor(trajectory.latents)
            advantages = torch.tensor(meta.advantages).clamp(-5, 5)
            for i in trajectory.train_steps:
                x, x_next = latents[:, i], latents[:, i + 1]
                s = sigmas[i].expand(len(x))
                v = policy.velocity(x, s, condition, None, meta.sampling)
                std = float(torch.sqrt(sigmas[i] / (1 - (sigmas[1] if i == 0 else sigmas[i]))))
                dt = float(sigmas[i + 1] - sigmas[i])
                mean = x * (1 + std**2 / (2 * s[0]) * dt) + v * (1 + std**2 * (1 - s[0]) / (2 * s[0])) * dt
                log_prob = (-((x_next - mean) ** 2) / (2 * std**2 * -dt)).flatten(1).mean(1)
                ratio = torch.exp(log_prob - log_prob.detach())
                (-(advantages * ratio).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
        adam.step()
        adam.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def test_one_rank_equals_a_bare_loop(handed: list[list[rig.Handed]]) -> None:
    """With one optimizer step per batch every ratio is 1."""
    config = rig.tiny_config(max_grad_norm=2e-3, eps=1e-5)
    worker, norms = rig.trainer(config), []
    before = rig.weights(worker)
    for step, batch in enumerate(handed):
        stats = rig.update(worker, step, batch)
        norms.append(stats.metrics["grad_norm"])
        assert stats.metrics["ratio/mean"] == 1.0 and stats.metrics["clip_fraction"] == 0.0
        assert stats.kept == {0: (24, 24)}
        probed = {"probe"} if step == 0 else set()
        assert {span.name for span in stats.spans} == {"forward", "backward", "optimizer"} | probed
    expected = bare_loop(config, handed)
    assert max(norms) > config.trainer.max_grad_norm, "clipping must be part of the comparison"
    assert rig.distance(rig.weights(worker), before) > 1e-3
    # lr 1e-2 and three steps: an update that differs at all in direction differs by 1e-3 and more.
    assert rig.distance(rig.weights(worker), expected) < 2e-5


def test_hand_over_groupings_give_the_same_bits(handed: list[list[rig.Handed]]) -> None:
    one, other, cut, reversed_order = (rig.trainer(rig.tiny_config()) for _ in range(4))
    for step, batch in enumerate(handed[:2]):
        rig.update(one, step, batch)
        rig.update(other, step, batch, together=True)
        rig.update(cut, step, [in_two_tickets(group) for group in batch])
        rig.update(reversed_order, step, batch[::-1])
    assert one.parameters.fingerprint() == other.parameters.fingerprint() == cut.parameters.fingerprint()
    assert one.parameters.fingerprint() == reversed_order.parameters.fingerprint(), "integers are added in any order"


def test_images_that_are_not_selected_do_not_train(handed: list[list[rig.Handed]]) -> None:
    """The gradient is that of a group in which the others have an advantage of 0, over fewer rows."""
    meta, tickets = handed[0][0]
    kept = GroupAdvantages(AlgorithmConfig(train_images_per_group=2)).select(np.asarray(meta.advantages))
    advantages = tuple(value if i in kept else 0.0 for i, value in enumerate(meta.advantages))
    gradients = [
        rig.gradient_of(rig.tiny_config(), [(shown, tickets)]) * len(shown.selected)
        for shown in (replace(meta, parts=cut(kept, 2)), replace(meta, advantages=advantages))
    ]
    assert gradients[0].norm() > 0
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def in_two_tickets(group: rig.Handed) -> rig.Handed:
    meta, (whole,) = group
    halves = [
        replace(whole, latents=whole.latents[h], log_probs=whole.log_probs[h]) for h in (slice(0, 2), slice(2, 4))
    ]
    return replace(meta, tickets=2), halves


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (2, 3), (4, 3)])
@pytest.mark.extended
def test_micro_batching_changes_only_roundings(handed: list[list[rig.Handed]], samples: int, steps: int) -> None:
    one, other = rig.tiny_config(), rig.tiny_config(micro_batch_size=samples, timesteps_per_forward=steps)
    gradients = [rig.gradient_of(config, handed[0]) for config in (one, other)]
    assert gradients[0].norm() > 0
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def test_two_updates_of_a_batch_are_centred_on_its_start(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    config = rig.tiny_config(updates_per_batch=2)
    config.algorithm.clip_range = 1e9
    worker = rig.trainer(config)
    first, second = handed[0]
    worker.update.proximal(TrainRequest(0, (second[0],)), *second[1])
    rig.update(worker, 0, [first])
    assert worker.versions.newest == 0, "the version advances with the batch, not with the optimizer step"
    worker.update.begin(0, StepPlan(rows=rig.rows([second]), update=1))
    worker.update.accumulate([second[0]], *second[1])
    stats = rig.finish(worker)
    assert worker.versions.newest == 1
    assert stats.metrics["ratio_deviation_squared"] > 1e-9
    assert stats.metrics["log_prob_gap"] < 1e-6, "the proximal policy is the one that sampled"
    centred_on_live = rig.trainer(config)
    rig.update(centred_on_live, 0, [first])
    centred_on_live.update.proximal(TrainRequest(0, (second[0],)), *second[1])
    late = rig.update(centred_on_live, 0, [second], plan=StepPlan(rows=rig.rows([second]), update=1))
    assert late.metrics["ratio_deviation_squared"] == 0.0


def test_every_second_block_is_checkpointed_where_that_is_wanted() -> None:
    """That it changes no gradient: tests/unit/policies/test_families.py."""
    worker = rig.trainer(rig.tiny_config(gradient_checkpointing="every_2"))
    assert ["forward" in vars(block) for block in worker.policy.blocks] == [True, False]


def test_ema_and_learning_rate_follow_their_counters(handed: list[list[rig.Handed]]) -> None:
    config = rig.tiny_config(ema_decay=0.9, ema_every=2, warmup_steps=2, lr_schedule="linear")
    config.total_steps = 4
    worker = rig.trainer(config)
    start = rig.weights(worker, average=True)
    rates = []
    for step, batch in enumerate(handed):
        rates.append(rig.update(worker, step, batch).metrics["lr"])
        if step == 0:
            assert rig.equal(rig.weights(worker, average=True), start)
    assert rates == [0.005, 0.01, 0.01]
    average = rig.weights(worker, average=True)
    assert 0 < rig.distance(average, start) < rig.distance(rig.weights(worker), start)


def test_a_warm_start_is_where_training_begins_and_what_the_kl_is_taken_to(
    handed: list[list[rig.Handed]], tmp_path: Path
) -> None:
    first = rig.trainer(rig.tiny_config())
    rig.update(first, 0, handed[0])
    config = rig.tiny_config()
    config.algorithm.kl_coef = 0.04
    config.lora.path = str(lora_file.write(tmp_path, tensors(rig.weights(first)), alpha=config.lora.alpha))
    warm = rig.trainer(config)
    assert warm.parameters.fingerprint() == first.parameters.fingerprint()
    kl = [rig.update(warm, step, batch).metrics["kl"] for step, batch in enumerate(handed[:2])]
    assert kl[0] == 0.0 and kl[1] > 0
    resumed = rig.trainer(config)
    resumed.restore(warm.save(warm.snapshot(), str(tmp_path / "checkpoints"), {}))
    assert rig.update(resumed, 2, handed[0]).metrics["kl"] > 0, "the reference is the warm start, not what was resumed"


@pytest.mark.extended
def test_the_reference_is_set_anew_every_n_steps() -> None:
    """With n = 2 the KL of a step is 0 at steps 0, 2 and 4: the weights that begin it are the reference."""
    config = rig.tiny_config()
    config.algorithm.kl_coef, config.algorithm.reference_every = 1.0, 2
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    kl = [rig.update(worker, step, [sampler.group(step, 0, version=step)]).metrics["kl"] for step in range(5)]
    assert [value == 0.0 for value in kl] == [True, False, True, False, True]


class OneNumber(FlowGRPO):
    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        output = super().loss(batch, current, frozen)
        return LossOutput(output.loss.mean(), output.metrics)


class Undeclared(FlowGRPO):
    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        return super().loss(batch, dict(current)["error"], frozen)  # type: ignore[arg-type]


class UndeclaredTerm(FlowGRPO):
    def group_terms(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> torch.Tensor:
        return frozen["average"]["log_prob"]


class WithoutProbe(FlowGRPO):
    def __init__(self, config: AlgorithmConfig, *, correction: str) -> None:
        super().__init__(config, correction=correction)
        self.needs = ("behaviour",)

    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        return super().loss(batch, {**frozen["behaviour"], **current}, frozen)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("OneNumber", "flow_grpo must be a tensor"),
        ("Undeclared", "the loss of algorithm flow_grpo finds no 'error'"),
        ("UndeclaredTerm", "the group_terms of algorithm flow_grpo finds no 'average'"),
        ("WithoutProbe", "the loss of algorithm flow_grpo finds no 'behaviour'"),
    ],
)
def test_a_loss_that_gives_or_reads_what_it_must_not_is_refused(
    name: str, named: str, handed: list[list[rig.Handed]]
) -> None:
    config = rig.tiny_config()
    config.algorithm.name = f"{__name__}:{name}"
    with pytest.raises(ValueError, match=named):
        rig.update(rig.trainer(config), 0, handed[0])
