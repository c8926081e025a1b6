"""Tests of one rank's optimizer step against a loop written out by hand, and of the rules around it."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import LossOutput
from async_flowrl.config.schema import Config
from async_flowrl.export import save_lora
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.merged_stats import merged
from async_flowrl.training.messages import Manifest, PartStats, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.micro_batches import Group
from async_flowrl.training.part_gradients import NonFiniteError
from async_flowrl.training.update_metrics import PartSums
from async_flowrl.types import Trajectory
from tests.support import trainer_rig as rig


@pytest.fixture(scope="module")
def sampler() -> rig.Sampler:
    return rig.Sampler(rig.tiny_config())


@pytest.fixture(scope="module")
def bfloat16() -> tuple[Config, rig.Sampler]:
    """A configuration with a bfloat16 base, and its sampler."""
    config = rig.tiny_config()
    config.model.dtype = "bfloat16"
    return config, rig.Sampler(config)


@pytest.fixture(scope="module")
def handed(sampler: rig.Sampler) -> list[list[rig.Handed]]:
    """Three batches of two groups, sampled from the initial weights."""
    return [[sampler.group(step, group) for group in (0, 1)] for step in range(3)]


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
    config = rig.tiny_config(max_grad_norm=2e-3)
    worker = rig.trainer(config)
    before = rig.weights(worker)
    norms = [rig.update(worker, step, batch).metrics["grad_norm"] for step, batch in enumerate(handed)]
    expected = bare_loop(config, handed)
    assert max(norms) > config.trainer.max_grad_norm, "clipping must be part of the comparison"
    assert rig.distance(rig.weights(worker), before) > 1e-3
    # lr 1e-2 and three steps: an update that differs at all in direction differs by 1e-3 and more.
    assert rig.distance(rig.weights(worker), expected) < 2e-5


def test_the_same_update_twice_gives_the_same_bits(handed: list[list[rig.Handed]]) -> None:
    digests = []
    for _ in range(2):
        worker = rig.trainer(rig.tiny_config())
        for step, batch in enumerate(handed[:2]):
            rig.update(worker, step, batch)
        digests.append(worker.weights_digest())
    assert digests[0] == digests[1]


def test_hand_over_groupings_give_the_same_bits(handed: list[list[rig.Handed]]) -> None:
    one, other, cut, reversed_order = (rig.trainer(rig.tiny_config()) for _ in range(4))
    for step, batch in enumerate(handed[:2]):
        rig.update(one, step, batch)
        rig.update(other, step, batch, together=True)
        rig.update(cut, step, [in_two_tickets(group) for group in batch])
        rig.update(reversed_order, step, batch[::-1])
    assert one.weights_digest() == other.weights_digest() == cut.weights_digest()
    assert one.weights_digest() == reversed_order.weights_digest(), "integers are added in any order"


def in_two_tickets(group: rig.Handed) -> rig.Handed:
    meta, (whole,) = group
    halves = [
        replace(whole, latents=whole.latents[h], log_probs=whole.log_probs[h]) for h in (slice(0, 2), slice(2, 4))
    ]
    return replace(meta, tickets=2), halves


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (2, 3), (4, 3)])
def test_micro_batching_changes_only_roundings(handed: list[list[rig.Handed]], samples: int, steps: int) -> None:
    one = rig.trainer(rig.tiny_config())
    other = rig.trainer(rig.tiny_config(micro_batch_size=samples, timesteps_per_forward=steps))
    gradients = []
    for worker in (one, other):
        worker.update.begin(0, StepPlan(rows=rig.rows(handed[0])))
        for meta, tickets in handed[0]:
            worker.update.accumulate([meta], *tickets)
        gradients.append(rig.gradient(worker))
    assert gradients[0].norm() > 0
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def test_the_first_optimizer_step_has_ratio_one(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    for step, batch in enumerate(handed):
        stats = rig.update(worker, step, batch)
        assert stats.metrics["ratio/mean"] == 1.0 and stats.metrics["clip_fraction"] == 0.0
        assert stats.kept == {0: (24, 24)}
        probed = {"probe"} if step == 0 else set()
        assert {span.name for span in stats.spans} == {"forward", "backward", "optimizer"} | probed


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


def test_a_later_update_without_its_proximal_phase_is_refused(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config(updates_per_batch=2))
    rig.update(worker, 0, handed[0][:1])
    worker.update.begin(0, StepPlan(rows=12, update=1))
    with pytest.raises(ValueError, match="group 1 has no proximal predictions"):
        worker.update.accumulate([handed[0][1][0]], *handed[0][1][1])


def test_a_step_without_groups_makes_a_version_and_moves_nothing(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    rig.update(worker, 0, handed[0])
    before = worker.weights_digest()
    worker.update.begin(1, StepPlan(rows=24))
    stats = rig.finish(worker)
    assert stats.skipped and worker.weights_digest() == before and worker.versions.newest == 2
    zero = [rig.with_advantages(group, [0.0] * 4) for group in handed[1]]
    rig.update(worker, 2, zero)
    assert worker.weights_digest() != before, (
        "Adam's momentum moves weights on a zero gradient: that is why it is skipped"
    )


def test_a_skipped_group_keeps_its_place_in_the_denominator(handed: list[list[rig.Handed]]) -> None:
    first, second = handed[0]
    gradients = []
    for batch in ([first], [first, rig.with_advantages(second, [0.0] * 4)]):
        worker = rig.trainer(rig.tiny_config())
        worker.update.begin(0, StepPlan(rows=24))
        for meta, tickets in batch:
            worker.update.accumulate([meta], *tickets)
        gradients.append(rig.gradient(worker))
    assert torch.equal(gradients[0], gradients[1])


def test_a_non_finite_group_stops_the_step_by_name(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    before = worker.weights_digest()
    bad = handed[0][1][1][0]
    latents = bad.latents.copy()
    latents[2, 1] = np.nan
    worker.update.begin(7, StepPlan(rows=24))
    worker.update.accumulate([handed[0][0][0]], *handed[0][0][1])
    with pytest.raises(NonFiniteError, match="step 7, group 1: the loss is nan"):
        worker.update.accumulate([handed[0][1][0]], replace(bad, latents=latents))
    assert worker.weights_digest() == before


def test_kl_to_the_base_is_zero_at_the_start_and_grows(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    config = rig.tiny_config()
    config.algorithm.kl_coef = 0.04
    worker = rig.trainer(config)
    kl = [rig.update(worker, step, batch).metrics["kl"] for step, batch in enumerate(handed)]
    assert kl[0] == 0.0 and 0 < kl[1] < kl[2]


@pytest.mark.parametrize("name", ["gradient", "loss", "behaviour_gap"])
def test_a_metric_of_an_algorithm_never_replaces_one_of_the_trainer(name: str) -> None:
    sums, rows = PartSums(), torch.ones(2)
    with pytest.raises(ValueError, match=f"a metric named '{name}', which the trainer itself reports"):
        sums.add(LossOutput(rows, {name: rows}))


def test_only_the_lowest_group_counts_as_probed() -> None:
    """Each that came before a lower one was probed, too."""
    parts = [PartStats(g, 0, 0, 0, 0, 2, {"loss": 0.0, "behaviour_gap": gap}, 1.0) for g, gap in ((4, 9.0), (1, 0.5))]
    stats = UpdateStats(0, 0, False, {"grad_norm": 1.0}, rows=4, parts=tuple(parts))
    found = merged([stats])
    assert found.metrics["behaviour_gap"] == 0.25
    assert merged([replace(stats, parts=tuple(parts[::-1]))]) == found


@pytest.mark.parametrize(("how", "blocks"), [("full", [True, True]), ("every_2", [True, False])])
def test_gradient_checkpointing_gives_the_same_weights(
    how: str, blocks: list[bool], handed: list[list[rig.Handed]]
) -> None:
    plain, saving = rig.trainer(rig.tiny_config()), rig.trainer(rig.tiny_config(gradient_checkpointing=how))
    assert [isinstance(block.forward, functools.partial) for block in saving.policy.blocks] == blocks
    for step, batch in enumerate(handed[:1]):
        rig.update(plain, step, batch)
        rig.update(saving, step, batch)
    assert rig.distance(rig.weights(plain), rig.weights(saving)) < 1e-6


def test_behaviour_is_recomputed_under_the_version_that_sampled(sampler: rig.Sampler) -> None:
    config = rig.tiny_config()
    config.max_staleness = 2
    config.algorithm.correction = "mask"
    worker = rig.trainer(config)
    sampler.load(rig.weights(worker))
    old = [sampler.group(9, group, version=0, age=2) for group in (0, 1)]
    for step in range(2):
        fresh = rig.update(worker, step, [sampler.group(step, group) for group in (0, 1)])
    assert fresh.metrics["behaviour_divergence"] == 0.0, "at age 0 the behaviour policy is the live one"
    live = worker.weights_digest()
    worker.update.begin(2, StepPlan(rows=24))
    for meta, tickets in old:
        worker.update.accumulate([meta], *tickets)
    assert worker.weights_digest() == live, "the live weights are back after the behaviour pass"
    stats = rig.finish(worker)
    assert stats.metrics["behaviour_divergence"] > 0
    # float32 storage of the rollout's log-probs is all that is left between the two engines.
    assert stats.metrics["behaviour_gap"] < 1e-6 < 1e-4 < stats.metrics["log_prob_gap"]
    assert list(stats.kept) == [2]


def test_a_version_no_longer_kept_is_named(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    for step, batch in enumerate(handed):
        rig.update(worker, step, batch)
    assert sorted(worker.versions.retained) == [2, 3]
    meta, tickets = handed[0][0]
    worker.update.begin(3, StepPlan(rows=12))
    with pytest.raises(KeyError, match="version 0 is not kept"):
        worker.update.accumulate([replace(meta, version=0, age=3)], *tickets)


def test_wrong_weights_show_in_the_behaviour_gap(sampler: rig.Sampler, handed: list[list[rig.Handed]]) -> None:
    """The falsifier of `behaviour_gap`: samples of version 0 that claim to be of version 1."""
    worker = rig.trainer(rig.tiny_config())
    rig.update(worker, 0, handed[0])
    honest = rig.update(worker, 1, [(replace(m, version=0, age=1), t) for m, t in handed[1]])
    assert honest.metrics["behaviour_gap"] < 1e-6
    false = rig.update(worker, 2, [(replace(m, version=1, age=1), t) for m, t in handed[2]])
    assert false.metrics["behaviour_gap"] > 1e-4


def test_a_step_without_a_replay_has_the_same_weights_and_no_gap(
    sampler: rig.Sampler, handed: list[list[rig.Handed]]
) -> None:
    """The pass under the sampling weights is left out; where the loss makes it, or none is needed, the gap stays."""
    aged = [(replace(meta, version=0, age=1), tickets) for meta, tickets in handed[1]]
    replayed, spared = (rig.trainer(rig.tiny_config()) for _ in range(2))
    for worker, replay in ((replayed, True), (spared, False)):
        first = rig.update(worker, 0, handed[0], plan=StepPlan(rows=rig.rows(handed[0]), replay=False))
        assert first.metrics["behaviour_gap"] < 1e-6, "at age 0 it costs nothing"
        second = rig.update(worker, 1, aged, plan=StepPlan(rows=rig.rows(aged), replay=replay))
        assert ("behaviour_gap" in second.metrics) == replay
        assert ("behaviour" in [span.name for span in second.spans]) == replay
    assert replayed.weights_digest() == spared.weights_digest()
    config = rig.tiny_config()
    config.algorithm.correction = "mask"
    masked = rig.trainer(config)
    rig.update(masked, 0, handed[0])
    plan = StepPlan(rows=rig.rows(aged), replay=False)
    assert rig.update(masked, 1, aged, plan=plan).metrics["behaviour_gap"] < 1e-6, "this loss needs the pass"


def test_guidance_replays_with_the_negative_prompt_of_the_rollout() -> None:
    config = rig.tiny_config()
    config.rollout.true_cfg_scale = 3.0
    guided = rig.Sampler(config)
    worker = rig.trainer(config)
    group = guided.group(0, 0)
    worker.update.begin(0, StepPlan(rows=12))
    with pytest.raises(ValueError, match="negative prompt ' ' was not set"):
        worker.update.accumulate([group[0]], *group[1])
    worker.update.set_negatives(guided.negatives())
    assert rig.update(worker, 0, [group]).metrics["log_prob_gap"] < 1e-6
    worker.update.set_negatives({" ": guided.engine.encode(["something else"])[0]})
    worker.parameters.load(worker.versions.of(0))
    assert rig.update(worker, 1, [group]).metrics["log_prob_gap"] > 1e-4


def test_ema_and_learning_rate_follow_their_counters(handed: list[list[rig.Handed]]) -> None:
    config = rig.tiny_config(ema_decay=0.9, ema_every=2, warmup_steps=2, lr_schedule="linear")
    config.total_steps = 4
    worker = rig.trainer(config)
    start = worker.tensors(average=True)
    rates = []
    for step, batch in enumerate(handed):
        rates.append(rig.update(worker, step, batch).metrics["lr"])
        if step == 0:
            assert rig.equal(worker.tensors(average=True), start)
    assert rates == [0.005, 0.01, 0.01]
    average = worker.tensors(average=True)
    assert 0 < rig.distance(average, start) < rig.distance(rig.weights(worker), start)


def test_groups_that_do_not_fit_are_refused(handed: list[list[rig.Handed]]) -> None:
    (meta, (trajectory,)), (_, (other,)) = handed[0]
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="4 images in 1 of 1 tickets, 3 advantages"):
        Group(replace(meta, advantages=(1.0, 2.0, 3.0)), [trajectory], device=device)
    with pytest.raises(ValueError, match="group 0 differ in schedule, window or conditioning"):
        Group(replace(meta, tickets=2), [half(trajectory, 0), half(other, 1)], device=device)
    worker = rig.trainer(rig.tiny_config())
    with pytest.raises(ValueError, match="1 groups have 1 tickets, got 2"):
        rig.update(worker, 0, [(meta, [trajectory, trajectory])], plan=StepPlan(rows=12))
    group = Group(meta, [trajectory], device=device)
    with pytest.raises(ValueError, match="trains 3 steps, which micro-batches of 2 do not divide"):
        list(group.micro_batches("transitions", 0, samples=1, steps=2))
    with pytest.raises(ValueError, match=r"group 0 has 1 parts of 4 samples for 1 ranks, its owners are \[1\]"):
        rig.update(worker, 0, [(replace(meta, owners=(1,)), [trajectory])])


def half(trajectory: Trajectory, index: int) -> Trajectory:
    part = slice(2 * index, 2 * index + 2)
    return replace(trajectory, latents=trajectory.latents[part], log_probs=trajectory.log_probs[part])


def test_rows_carry_their_own_step_and_seed(handed: list[list[rig.Handed]]) -> None:
    meta, (trajectory,) = handed[0][1]
    group = Group(meta, [trajectory], device=torch.device("cpu"))
    batches = [batch for part in (2, 3) for batch in group.micro_batches("transitions", part, samples=1, steps=3)]
    assert len(batches) == 2
    for batch, image in zip(batches, (2, 3), strict=True):
        assert batch.advantages.tolist() == [np.float32(meta.advantages[image])] * 3
    batch = batches[0]
    assert batch.steps.tolist() == [0, 1, 2]
    for row, step in enumerate((0, 1, 2)):
        assert torch.equal(batch.latents[row], torch.tensor(trajectory.latents[2, step]))
        assert torch.equal(batch.next_latents[row], torch.tensor(trajectory.latents[2, step + 1]))
        assert float(batch.sigma[row]) == trajectory.sigmas[step]
    seeds = [seed for b in batches for seed in b.seeds]
    assert len(set(seeds)) == len(seeds) == 6


def test_final_images_are_trained_at_every_row() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "diffusion_nft"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    group = sampler.group(0, 0)
    stats = rig.update(worker, 0, [group])
    assert stats.metrics["loss"] > 0 and stats.metrics["old_deviation"] == 0.0
    again = rig.update(worker, 1, [(replace(group[0], version=0, age=1), group[1])])
    assert again.metrics["old_deviation"] > 0
    assert sde.latent_elements(torch.tensor(group[1][0].latents[:, 0])) > 1


def test_a_pair_trains_on_its_best_and_worst_image() -> None:
    config = rig.tiny_config()
    config.algorithm.name = "dpo"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    meta, tickets = sampler.group(0, 0)
    chosen = tuple(worker.algorithm.select(np.asarray(meta.advantages)))
    pair = replace(meta, selected=chosen), tickets
    stats = [rig.update(worker, step, [pair]) for step in range(4)]
    assert stats[0].metrics["loss"] == pytest.approx(np.log(2.0), abs=1e-6)
    assert stats[-1].metrics["loss"] < stats[0].metrics["loss"]


def test_a_bfloat16_base_keeps_float32_adapters_and_closes_the_loop(bfloat16: tuple[Config, rig.Sampler]) -> None:
    config, sampler = bfloat16
    worker = rig.trainer(config)
    group = sampler.group(0, 0)
    first = rig.update(worker, 0, [group])
    # The sampler is on the CPU; a trainer on a GPU has other attention kernels.
    gap = 1e-6 if worker.device.type == "cpu" else 1e-4
    assert first.metrics["ratio_deviation_squared"] == 0.0 and first.metrics["behaviour_gap"] < gap
    assert {tensor.dtype for tensor in worker.tensors().values()} == {np.dtype(np.float32)}
    assert {p.dtype for p in worker.policy.transformer.parameters()} == {torch.bfloat16, torch.float32}
    assert 0.1 < first.metrics["adapter/changed_share"] <= 1.0


def test_a_step_too_small_to_show_in_bfloat16_is_counted_and_warned_of_once(
    bfloat16: tuple[Config, rig.Sampler], caplog: pytest.LogCaptureFixture
) -> None:
    """Masters move, the versions that rollouts compute with hardly do."""
    config, sampler = rig.tiny_config(learning_rate=1e-9), bfloat16[1]
    config.model.dtype = "bfloat16"
    worker = rig.trainer(config)
    before = worker.weights_digest()
    worker.parameters.values.data.add_(1.0)  # B starts at zero, where any step shows
    worker.versions.retain(0)
    shares = [rig.update(worker, step, [sampler.group(0, 0)]).metrics["adapter/changed_share"] for step in range(2)]
    assert worker.weights_digest() != before and max(shares) < 0.01
    warnings = [record.getMessage() for record in caplog.records if "as rollouts compute with them" in record.message]
    assert len(warnings) == 1 and "(bfloat16)" in warnings[0] and "step 0" in warnings[0]


def test_what_a_step_changed_is_known_where_only_the_newest_version_is_kept(
    bfloat16: tuple[Config, rig.Sampler],
) -> None:
    config, sampler = rig.tiny_config(), bfloat16[1]
    config.model.dtype, config.max_staleness = "bfloat16", 0
    worker = rig.trainer(config)
    first, second = (rig.update(worker, step, [sampler.group(step, 0)]) for step in range(2))
    assert sorted(worker.versions.retained) == [2]
    assert all(0.1 < stats.metrics["adapter/changed_share"] <= 1.0 for stats in (first, second))


def test_float32_versions_say_nothing_of_rounding(handed: list[list[rig.Handed]]) -> None:
    assert "adapter/changed_share" not in rig.update(rig.trainer(rig.tiny_config()), 0, handed[0]).metrics


def test_a_plan_without_rows_takes_no_groups(handed: list[list[rig.Handed]]) -> None:
    worker = rig.trainer(rig.tiny_config())
    with pytest.raises(ValueError, match="its plan counts 0 rows"):
        rig.update(worker, 3, handed[0], plan=StepPlan(rows=0))
    with pytest.raises(RuntimeError, match="before begin"):
        rig.finish(rig.trainer(rig.tiny_config()))
    with pytest.raises(ValueError, match="step 0 has no update 1"):
        worker.update.begin(0, StepPlan(rows=1, update=1))


def test_a_warm_start_is_where_training_begins_and_what_the_kl_is_taken_to(
    handed: list[list[rig.Handed]], tmp_path: Path
) -> None:
    first = rig.trainer(rig.tiny_config())
    rig.update(first, 0, handed[0])
    config = rig.tiny_config()
    config.algorithm.kl_coef = 0.04
    config.lora.path = str(save_lora(tmp_path, first.tensors(), alpha=config.lora.alpha))
    warm = rig.trainer(config)
    assert warm.weights_digest() == first.weights_digest()
    kl = [rig.update(warm, step, batch).metrics["kl"] for step, batch in enumerate(handed[:2])]
    assert kl[0] == 0.0 and kl[1] > 0
    warm.snapshot()
    resumed = rig.trainer(config)
    resumed.restore(warm.save(str(tmp_path / "checkpoints"), {}))
    assert rig.update(resumed, 2, handed[0]).metrics["kl"] > 0, "the reference is the warm start, not what was resumed"


def test_delays_change_only_time(handed: list[list[rig.Handed]], monkeypatch: pytest.MonkeyPatch) -> None:
    config = rig.tiny_config()
    config.debug.delays.update, config.debug.delays.constant = 0.25, True
    slept: list[float] = []
    monkeypatch.setattr("async_flowrl.observability.delays.time.sleep", slept.append)
    slow, plain = rig.trainer(config), rig.trainer(rig.tiny_config())
    rig.update(slow, 0, handed[0])
    rig.update(plain, 0, handed[0])
    assert slept == [0.25] and slow.weights_digest() == plain.weights_digest()


def test_one_call_does_what_several_do(handed: list[list[rig.Handed]]) -> None:
    """A whole step in one call, in two, and by hand: the same bits."""
    metas = tuple(meta for meta, _ in handed[0])
    tickets = [ticket for _, group in handed[0] for ticket in group]
    plan = StepPlan(rows=rig.rows(handed[0]))
    whole, halves = rig.trainer(rig.tiny_config()), rig.trainer(rig.tiny_config())
    finished = whole.train(TrainRequest(0, metas, plan, finishes=True), *tickets)
    first, second = TrainRequest(0, metas, plan, finishes=True).split()
    assert (first.begins, first.finishes, second.begins, second.finishes) == (plan, False, None, True)
    added = halves.train(first, *handed[0][0][1])
    assert isinstance(added, Manifest) and added.parts == ((metas[0].group, 0),)
    assert isinstance(finished, UpdateStats) and finished.metrics == halves.train(second, *handed[0][1][1]).metrics  # type: ignore[union-attr]
    by_hand = rig.trainer(rig.tiny_config())
    rig.update(by_hand, 0, handed[0], plan=plan)
    assert whole.weights_digest() == halves.weights_digest() == by_hand.weights_digest()
