"""Tests of the memory plan against the bytes of real tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from async_flowrl.cli.cards import CARDS, gib_of
from async_flowrl.cli.plan_memory import all_fit
from async_flowrl.cli.rehearse import BOTH, rehearse
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.memory.devices import changes, check_devices, describe_gpus, gpus_taken, processes, reward_seats
from async_flowrl.memory.footprints import (
    GIB,
    host_bytes,
    plan_memory,
    planned_trainer,
    rollout_footprint,
    trainer_footprint,
)
from async_flowrl.memory.model_sizes import Sizes, at_largest, stored_sizes
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.rank import rehearse_trainer
from async_flowrl.memory.rehearsal.rollout import rehearse_rollout
from async_flowrl.memory.rehearsed import alone, model_sizes, rehearsed_rank, rehearsed_rollout, training_peak
from async_flowrl.memory.trainer_layout import resolved_on
from async_flowrl.policies.quantized_layer import FORMATS, QuantizedLinear
from async_flowrl.policies.registry import load_family, load_policy, resolve_model
from async_flowrl.policies.stored import stored_elements
from async_flowrl.rewards.clip import VIT_H, VIT_L, PickScore
from async_flowrl.tickets.arithmetic import ticket_bytes
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.parts import World
from checkpoint_engine.side_stream import pinned_bytes
from tests.support.allocations import Allocations
from tests.support.families import NAMES, how, model_config, tiny_model
from tests.support.fused_attention import fused_attention
from tests.support.shared_models import SharedModels


@pytest.mark.extended
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


@pytest.mark.extended
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


def test_an_offloaded_base_is_planned_as_torch_pins_it(shared_models: SharedModels) -> None:
    config = compose_config("one_step_off", ["model=tiny", "trainer.cpu_offload=true"])
    sizes = [parameter.nbytes for parameter in shared_models.tiny.transformer.parameters()]
    surely, at_most = (host_bytes(config, model_sizes(config), certain=certain) for certain in (True, False))
    assert sum(sizes) == surely < sum(map(pinned_bytes, sizes)) <= at_most


@pytest.mark.extended
def test_a_loss_through_the_reward_counts_the_reward_and_the_vae() -> None:
    one = ("model=tiny", "reward=clip_score", "trainer.micro_batch_size=1", "trainer.timesteps_per_forward=1")
    plain = planned_trainer(compose_config("one_step_off", [*one, "algorithm=diffusion_nft"]))
    parts = planned_trainer(compose_config("one_step_off", [*one, "algorithm=direct_align", "group_size=1"])).parts
    assert parts["reward clip_score"] == round((VIT_L[0] + VIT_L[2]) * GIB)
    assert parts["activations"] > 2 * plain.parts["activations"]


@pytest.mark.extended
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


ON_SMALL_CARDS = {"qwen_image_1x24gb": 24, "qwen_image_21_1x24gb": 24, "flux_1x24gb": 24, "sd35_1x16gb": 16}
"""Experiment → GB of its one card."""


def tiny(*overrides: str) -> Config:
    return compose_config("one_step_off", ["model=tiny", "model.tiny.layers=1", "model.tiny.heads=16", *overrides])


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [name if name == "nf4" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_codes_and_scales_are_counted_as_they_are_stored(name: str) -> None:
    config = tiny(f"model.quantize={name}", "model.dtype=bfloat16")
    model = resolve_model(config.model)
    network = load_policy(model, dtype=model.dtype, device="cpu", parts="transformer").transformer
    sizes, plain = model_sizes(config), model_sizes(tiny("model.dtype=bfloat16"))
    assert sizes.base_bytes == sum(parameter.nbytes for parameter in network.parameters()) < 0.6 * plain.base_bytes
    assert sizes.base_parameters == plain.base_parameters
    by_header = stored_sizes(config, stored_elements(model.path, model.revision), itemsize=2)
    assert by_header.base_bytes == pytest.approx(sizes.base_bytes, rel=0.03)


@pytest.mark.extended
def test_a_quantised_base_is_advised_where_no_cheaper_setting_is_enough() -> None:
    config = tiny("model.dtype=bfloat16", "placement=shared", "rollout.text_encoder=cached")
    process = next(processes(config, lasting=True))
    advised = [list(change.items()) for change in changes(process, config)]
    stored = [advised.index([("model.quantize", name)]) for name in ("int8", "nf4")]
    assert advised.index([("rollout.batch_size", 1)]) < stored[0] < stored[1] < len(advised) - 1
    config.model.quantize = "int8"
    assert not any("model.quantize" in change for change in changes(process, config))


@pytest.mark.parametrize(("name", "most"), [("int8", 2), ("nf4", 4)])
def test_a_layer_makes_its_weights_in_little_memory(name: str, most: int) -> None:
    """Bytes for each; with four bits two of them are gone before the product begins."""
    layer = QuantizedLinear(nn.Linear(1024, 4096, device="meta", dtype=torch.bfloat16), name).to("meta")
    x = torch.empty(1, 1024, device="meta", dtype=torch.bfloat16)
    with Allocations() as counted:
        layer(x)
    assert most - 0.1 < counted.peak / (1024 * 4096) < most + 0.1


def test_a_card_has_what_torch_finds_on_it() -> None:
    assert [gib_of(gb) for gb in (16, 24, 48, 80)] == [15.5, 23.5, 47.4, 79.0]
    assert CARDS["L4"].memory / GIB == pytest.approx(22.1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", list(ON_SMALL_CARDS))
def test_the_recipes_fit_their_card_by_plan_and_by_rehearsal(experiment: str) -> None:
    device = gib_of(ON_SMALL_CARDS[experiment])
    config, _ = resolved_on(at_largest(compose_config("one_step_off", [f"experiment={experiment}"])), int(device * GIB))
    assert all_fit(config, device)
    both = next(processes(config))
    lasting = sum(size for name, size in both.footprint.parts.items() if name != "activations")
    visiting = model_sizes(config).text_bytes - both.footprint.parts["base weights"]  # It is not rehearsed.
    held = max(rehearse(config, CARDS["RTX4090"]).peaks()[BOTH].peak, lasting + visiting)
    assert lasting < held == pytest.approx(sum(both.footprint.parts.values()), rel=0.05)


def sizes(of: Sizes) -> dict[str, Any]:
    names = ("version_bytes", "text_bytes", "block_bytes", "adapter_parameters", "itemsize", "full")
    counted = {name: getattr(of, name) for name in names}
    return {**counted, "beside": pytest.approx(of.root_bytes, rel=0.01)}


@pytest.mark.extended
@pytest.mark.parametrize(
    "family", [name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_headers_of_the_files_say_the_sizes_of_the_network(family: str) -> None:
    given = compose_config("one_step_off", ["tune=full", "model.dtype=bfloat16"])
    given.model = replace(model_config(family), dtype="bfloat16")
    given.rollout.guidance_scale = how(family).guidance_scale
    model = resolve_model(given.model)
    stored = stored_elements(model.path, model.revision)
    by_header, real = stored_sizes(given, stored, itemsize=2), plan_memory(given).model
    assert sizes(by_header) == sizes(real) and by_header.adapter_parameters > 0
    assert by_header.root_bytes == pytest.approx(real.root_bytes, rel=0.01)
    # The headers do not say what a family keeps in float32: small tensors, but for a tiny network.
    kept = load_family(model.family).float32_parts()
    assert by_header.base_bytes <= real.base_bytes <= by_header.base_bytes * (1.1 if kept else 1.0)
    assert stored_sizes(replace(given, tune="lora"), stored, itemsize=2).adapter_parameters == 0


class Judge:
    """A reward that says what it takes."""

    @staticmethod
    def memory_gib(gib: float | None = 3.0, **options: Any) -> float | None:
        return gib

    def __init__(self, gib: float | None = 3.0) -> None:
        self.gib = gib

    def __call__(self, images: Any, prompt: Any) -> list[float]:
        return [0.0] * len(images)


def judge(gib: float | None = 3.0, **seat: Any) -> RewardTerm:
    return RewardTerm(name=f"{__name__}:Judge", options={"gib": gib}, **seat)


def seated(*overrides: str, **terms: RewardTerm) -> Config:
    config = compose_config("one_step_off", ["model.dtype=float32", *overrides])
    config.reward.terms = {"color": RewardTerm(), **terms}
    return config


@pytest.mark.extended
def test_clip_takes_what_it_says() -> None:
    """ViT-H/14 on the meta device, a batch of 16: its weights, and what passes while it embeds images."""
    from transformers import CLIPConfig, CLIPModel

    size: dict[str, Any] = {"num_attention_heads": 16, "projection_dim": 1024}
    text = {**size, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {**size, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "patch_size": 14}
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024)).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad(), fused_attention(), Allocations() as counted:
        model.vision_model(pixel_values=torch.zeros(16, 3, 224, 224, device="meta"))
    assert VIT_H[0] * GIB == pytest.approx(weights, rel=0.01)
    assert PickScore.memory_gib() == pytest.approx((weights + counted.peak) / GIB, rel=0.02)
    assert (PickScore.memory_gib(model="mine"), PickScore.memory_gib(device="cpu")) == (None, 0.0)


def test_seats_are_counted_among_the_devices() -> None:
    config = seated("reward.gpus_per_worker=0.25", "reward.num_workers=2", judge=judge(workers=2, gpus_per_worker=1))
    assert [(seat.pools, seat.share) for seat in reward_seats(config)] == [(("reward",), 0.25), (("reward/judge",), 1)]
    assert gpus_taken(config) == 1 + 1 + 2 + 1
    assert describe_gpus(config) == "the run takes 5 devices: trainer 1, rollout 1, reward 2 x 0.25, reward/judge 2"
    config.rollout.gpus_per_worker = 0.5
    assert gpus_taken(config) == 4
    config.evaluate.reward.terms = {"a": judge(5.0, gpus_per_worker=0.5), "b": judge(7.0)}
    assert [(*seat.pools, seat.footprint.parts) for seat in reward_seats(config)] == [
        ("reward", {"reward models: b": 7 * GIB}),
        ("reward/judge", {"reward models: judge": 3 * GIB}),
        ("held_out/a", {"reward models: a": 5 * GIB}),
    ]
    assert reward_seats(config)[-1].key == "evaluate.reward.terms.a.gpus_per_worker"
    assert describe_gpus(config).endswith("reward 2 x 0.25, reward/judge 2, held_out/a 2 x 0.5")
    assert gpus_taken(config) == 5
    assert gpus_taken(seated("placement=shared")) == 1


def test_a_seat_that_is_too_small_is_refused_before_models_are_loaded() -> None:
    config = seated(judge=judge(20.0, gpus_per_worker=0.25))
    with pytest.raises(ConfigError) as refused:
        check_devices(config, {"reward/judge": 79 * GIB})
    assert "a worker of the pool reward/judge needs 20 of its 19.8 GiB" in str(refused.value)
    assert "reward.terms.judge.gpus_per_worker=0.3 " in str(refused.value)
    for gib in (19, 22):  # Without margin and runtime it would fit the second.
        with pytest.raises(ConfigError, match=r"reward\.terms\.judge\.gpus_per_worker=1 and a device of 24 GiB"):
            check_devices(config, {"reward/judge": gib * GIB})
    whole = seated(judge=judge(20.0, gpus_per_worker=1.0))
    (tight,) = check_devices(whole, {"reward/judge": 24 * GIB})
    assert "needs 23.4 of its 24 GiB" in tight
    config.allow_oom = True
    assert any("needs 20 of its" in warning for warning in check_devices(config, {"reward/judge": 79 * GIB}))
    config.reward.terms["judge"].options = {"gib": 16.0}
    (tight,) = check_devices(config, {"reward/judge": 79 * GIB})
    assert "a worker of the pool reward/judge needs" in tight
    config.reward.terms["judge"].options = {"gib": None}
    assert check_devices(config, {"reward/judge": 79 * GIB}) == []


def test_tensor_parallel_changes_what_a_gpu_holds_and_how_many_there_are() -> None:
    config = compose_config("one_step_off", ["rollout.engine=vllm_omni"])
    spread = replace(config, rollout=replace(config.rollout, gpus_per_worker=4))
    model = model_sizes(config)
    one, four = (rollout_footprint(each, model).parts["base weights"] for each in (config, spread))
    assert four == -(-one // 4)
    assert (gpus_taken(config), gpus_taken(spread)) == (2, 5)


@pytest.mark.extended
def test_text_encoders_are_counted_with_a_quarter_that_is_not_quantised() -> None:
    config = tiny("model.quantize_text_encoder=int8", "rollout.text_encoder=resident")
    parameters = 1_000_000
    counted = replace(model_sizes(config), text_bytes=0)
    assert rollout_footprint(config, counted).parts["text encoders"] == 0
    elements = replace(stored_elements(resolve_model(config.model).path), text_encoders=parameters)
    assert stored_sizes(config, elements, itemsize=2).text_bytes == pytest.approx(1.25 * parameters, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen_image_ocr", 20_430_401_088), ("sd35_ocr", 2_243_171_520), ("flux_pickscore", 11_901_408_320)],
)
def test_the_recipes_count_the_published_parameters_of_their_transformers(name: str, parameters: int) -> None:
    plan = plan_memory(compose_config("one_step_off", [f"experiment={name}"]))
    assert plan.model.base_parameters == parameters
    assert plan.trainer.parts["base weights"] == plan.rollout.parts["base weights"]
    assert plan.rollout.parts["base weights"] == 2 * parameters + plan.model.buffer_bytes
