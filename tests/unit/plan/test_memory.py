"""Tests of the memory plan against the bytes of real tensors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from async_flowrl.cli.plan_memory import describe
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import GIB, host_bytes, plan_memory, planned_trainer, trainer_footprint
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.rank import rehearse_trainer
from async_flowrl.memory.rehearsal.rollout import rehearse_rollout
from async_flowrl.memory.rehearsed import alone, model_sizes, rehearsed_rank, rehearsed_rollout, training_peak
from async_flowrl.rewards.clip import VIT_L
from async_flowrl.tickets.arithmetic import ticket_bytes
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.parts import World
from tests.support.allocations import Allocations
from tests.support.families import NAMES, how, tiny_model
from tests.support.fused_attention import fused_attention
from tests.support.shared_models import SharedModels

RECIPES = {"qwen_image_ocr": 20_430_401_088, "sd35_ocr": 2_243_171_520, "flux_pickscore": 11_901_408_320}
"""The transformers' parameters."""


def recipe(name: str, *overrides: str) -> Config:
    return compose_config("one_step_off", [f"experiment={name}", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_are_planned_from_their_published_shapes(name: str) -> None:
    config = recipe(name)
    plan = plan_memory(config)
    assert plan.model.base_parameters == RECIPES[name]
    buffers = plan.model.buffer_bytes
    assert plan.trainer.parts["base weights"] == plan.rollout.parts["base weights"] == 2 * RECIPES[name] + buffers
    sharded = trainer_footprint(replace(config, trainer=replace(config.trainer, shard="full")), plan.model)
    assert sharded.parts["base weights"] == -(-2 * RECIPES[name] // config.trainer.num_workers) + buffers
    assert sharded.parts["gathered blocks"] > plan.model.block_bytes
    assert "a trainer rank needs" in describe(plan, config, 79.0)
    assert plan.trainer.total < plan.rollout.total < 79 * 2**30


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("sd3", "full"),
        *(pytest.param(name, "every_2", marks=pytest.mark.slow) for name in NAMES[::2]),
        *(pytest.param(name, "none", marks=pytest.mark.slow) for name in NAMES[1::2]),
    ],
)
def test_a_few_blocks_tell_the_peak_of_all(family: str, checkpointing: str) -> None:
    """The same model rehearsed whole, of four blocks a stack."""
    config = compose_config("one_step_off", [f"model={tiny_model(family)}"])
    config.model.tiny.layers, config.model.tiny.heads, config.lora.rank = 4, 4, 4
    config.rollout.guidance_scale = how(family).guidance_scale
    config.rollout.resolution, config.trainer.micro_batch_size = 64, 2
    config.trainer.gradient_checkpointing = checkpointing
    whole = rehearse_trainer(alone(config), FakeModel.of(config))
    peak = max(phase.peak for name, phase in whole.phases.items() if name != "load")
    assert training_peak(config) == pytest.approx(peak, rel=0.03)
    assert model_sizes(config) == whole.sizes


def test_two_chunks_of_a_ticket_tell_the_peak_of_many() -> None:
    """The same ticket rehearsed whole, of six chunks."""
    config = compose_config("one_step_off", ["model=tiny", "group_size=12", "rollout.batch_size=2"])
    whole = rehearse_rollout(alone(config), FakeModel.of(config).shortened(2, 1)[0][1])
    few = rehearsed_rollout(config)
    assert (few.chunks, replace(few, phases={})) == (6, replace(whole, phases={}))
    peaks = {name: phase.peak for name, phase in whole.phases.items()}
    assert {name: phase.peak for name, phase in few.phases.items()} == pytest.approx(peaks, rel=1e-3)


@pytest.mark.parametrize(("tune", "ranks"), [("lora", 1), ("full", 2)])
def test_the_sum_of_the_gradients_is_planned_as_a_rank_holds_it(tune: str, ranks: int) -> None:
    config = compose_config("one_step_off", ["model=tiny", f"tune={tune}", f"trainer.num_workers={ranks}"])
    model = model_sizes(config)
    planned = trainer_footprint(config, model).parts["sum of the gradients"]
    total = ExactSum(model.adapter_parameters, torch.device("cpu"))
    total.reduce(World(0, ranks))
    of_gradients = slice(model.adapter_parameters)  # behind them is the account
    assert sum({t.data_ptr(): t[of_gradients].nbytes for t in (total.values, total.whole)}.values()) == planned


def test_each_stream_of_whole_weights_pins_its_versions() -> None:
    config = compose_config("one_step_off", ["model=tiny", "tune=full", "trainer.ema_decay=null", "evaluate.every=0"])
    model = model_sizes(config)
    alone = host_bytes(config, model)
    config.evaluate.every = 10
    assert host_bytes(config, model) == alone + alone // (config.live_versions + 2), "the next one to be evaluated"
    config.trainer.ema_decay = 0.9
    assert host_bytes(config, model) == 2 * alone > 0


def test_a_loss_through_the_reward_counts_the_reward_and_the_vae() -> None:
    one = ("model=tiny", "reward=clip_score", "trainer.micro_batch_size=1", "trainer.timesteps_per_forward=1")
    plain = planned_trainer(compose_config("one_step_off", [*one, "algorithm=diffusion_nft"]))
    parts = planned_trainer(compose_config("one_step_off", [*one, "algorithm=direct_align", "group_size=1"])).parts
    assert parts["reward clip_score"] == round((VIT_L[0] + VIT_L[2]) * GIB)
    assert parts["activations"] > 2 * plain.parts["activations"]


def test_storages_count_from_their_making_until_nothing_refers_to_them() -> None:
    with Allocations() as counted:
        one = torch.empty(1000, device="meta")
        view = one.view(10, 100)[2:]
        assert counted.live == 4000
        two = one + 1
        two.mul_(2)
        assert counted.live == 8000
        del one, two
        assert counted.live == 4000
        del view
    assert (counted.live, counted.peak) == (0, 8000)


def test_attention_is_counted_as_a_fused_kernel() -> None:
    query = torch.empty(1, 2, 512, 16, device="meta", requires_grad=True)
    with fused_attention(), Allocations() as counted:
        out = nn.functional.scaled_dot_product_attention(query, query, query)
    assert out.shape == query.shape
    assert counted.peak == 4 * (query.numel() + 2 * 512)


def test_a_tickets_bytes_are_those_of_its_arrays(shared_models: SharedModels) -> None:
    from async_flowrl.rollout.diffusers_engine import DiffusersEngine
    from tests.support.tiny import request

    config = Config()
    made = DiffusersEngine(shared_models.tiny).generate([request(16)])[0]
    assert made.trajectory is not None
    arrays = [made.images, made.trajectory.latents, made.trajectory.log_probs]
    told = ticket_bytes(config, rehearsed_rank(config).shapes)
    text = (128 - len(made.trajectory.conditioning["prompt_embeds"])) * 32 * 4
    assert told - text == sum(a.nbytes for a in [*arrays, *made.trajectory.conditioning.values()])
