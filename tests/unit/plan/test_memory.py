"""Tests of the memory plan against the bytes of real tensors."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from async_flowrl.cli import plan as planner
from async_flowrl.cli.plan_memory import describe
from async_flowrl.config.compose import compose_config
from async_flowrl.config.models import architectures
from async_flowrl.config.schema import Config
from async_flowrl.memory.processes import host_bytes, plan_memory, planned_trainer, trainer_footprint
from async_flowrl.memory.rehearsal.ledger import Allocations
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.trainer import rehearse_trainer
from async_flowrl.memory.rehearsed import alone, model_sizes, rehearsed_rank, training_peak
from async_flowrl.tickets.arithmetic import ticket_bytes
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.fsdp import World
from tests.support.families import NAMES, how
from tests.support.fused_attention import fused_attention
from tests.support.shared_models import SharedModels

ROOT = Path(__file__).parents[3]
RECIPES = {"qwen_image_ocr": 20_430_401_088, "sd35_ocr": 2_243_171_520, "flux_pickscore": 11_901_408_320}
"""The transformers' parameters."""
CHECKPOINTED = ("none", "every_2", "full")


def recipe(name: str, *overrides: str) -> Config:
    return compose_config("one_step_off", [f"experiment={name}", *overrides])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sd35_ocr" else pytest.mark.slow) for name in RECIPES]
)
def test_the_recipes_are_planned_from_their_published_shapes(name: str) -> None:
    config = recipe(name)
    plan = plan_memory(config)
    assert plan.model.base_parameters == RECIPES[name]
    buffers = plan.model.buffer_bytes
    assert plan.trainer.parts["base weights"] == plan.rollout.parts["base weights"] == 2 * RECIPES[name] + buffers
    sharded = trainer_footprint(replace(config, trainer=replace(config.trainer, shard="full")), plan.model)
    assert sharded.parts["base weights"] == -(-2 * RECIPES[name] // config.trainer.num_workers) + buffers
    assert sharded.parts["gathered blocks"] > plan.model.block_bytes
    assert "fits a device of 79 GiB" in describe(plan, config, 79.0)
    assert plan.trainer.total < plan.rollout.total < 79 * 2**30


def test_what_does_not_fit_is_said_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["model=tiny_sd3", "model.tiny.heads=4", "trainer.micro_batch_size=8"]
    small = ["model.tiny.layers=4", "rollout.resolution=128"]
    assert planner.main(["--memory", *plain, *small, "--device", "1"]) == 0
    said = capsys.readouterr().out
    assert "a trainer rank does not fit 1 GiB" in said and "with trainer.micro_batch_size=1 (" in said
    assert said.splitlines()[-1].startswith("type  async-flowrl plan --fit --cards 2x1 model=tiny_sd3")
    deep = [*plain, "model.tiny.layers=6"]
    kept, less, least = (activations(*deep, f"trainer.gradient_checkpointing={how}") for how in CHECKPOINTED)
    assert least < kept / 3 and 0.4 * kept < less < 0.7 * kept
    assert planner.main(["--memory", "model.path=Someone/Unknown", "model.family=flux"]) == 2
    assert "was not found" in capsys.readouterr().err


def activations(*overrides: str) -> int:
    return planned_trainer(compose_config("one_step_off", list(overrides))).parts["activations"]


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("qwen_image", "none"),
        ("sd3", "full"),
        *(pytest.param(name, "every_2", marks=pytest.mark.slow) for name in NAMES),
        *(pytest.param(name, "none", marks=pytest.mark.slow) for name in NAMES if name != "qwen_image"),
    ],
)
def test_a_few_blocks_tell_the_peak_of_all(family: str, checkpointing: str) -> None:
    """The same model rehearsed whole, of six blocks a stack."""
    config = compose_config("one_step_off", ["model=tiny" if family == "qwen_image" else f"model=tiny_{family}"])
    config.model.tiny.layers, config.model.tiny.heads, config.lora.rank = 6, 4, 4
    config.rollout.guidance_scale = how(family).guidance_scale
    config.rollout.resolution, config.trainer.micro_batch_size = 64, 2
    config.trainer.gradient_checkpointing = checkpointing
    whole = rehearse_trainer(alone(config), FakeModel.of(config), kernels=False)
    peak = max(phase.peak for name, phase in whole.phases.items() if name != "load")
    assert training_peak(config) == pytest.approx(peak, rel=0.03)
    assert model_sizes(config) == whole.sizes


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sum_of_the_gradients_is_planned_as_a_rank_holds_it(tune: str, ranks: int) -> None:
    config = compose_config("one_step_off", ["model=tiny", f"tune={tune}", f"trainer.num_workers={ranks}"])
    model = model_sizes(config)
    planned = trainer_footprint(config, model).parts["sum of the gradients"]
    total = ExactSum(model.adapter_parameters, torch.device("cpu"))
    total.reduce(World(0, ranks))
    of_gradients = slice(model.adapter_parameters)  # behind them is the account
    assert sum({t.data_ptr(): t[of_gradients].nbytes for t in (total._values, total._whole)}.values()) == planned


def test_each_stream_of_whole_weights_pins_its_versions() -> None:
    config = compose_config("one_step_off", ["model=tiny", "tune=full", "trainer.ema_decay=null", "evaluate.every=0"])
    model = model_sizes(config)
    alone = host_bytes(config, model)
    config.evaluate.every = 10
    assert host_bytes(config, model) == alone + alone // (config.live_versions + 2), "the next one to be evaluated"
    config.trainer.ema_decay = 0.9
    assert host_bytes(config, model) == 2 * alone > 0


RESIDENT = """
import torch
from diffusers import FluxTransformer2DModel
from async_flowrl.memory.rehearsal.ledger import Allocations
torch.set_num_threads(1)
model = FluxTransformer2DModel(num_layers=2, num_single_layers=3, num_attention_heads=8, attention_head_dim=64,
    axes_dims_rope=(16, 24, 24), joint_attention_dim=64, pooled_projection_dim=64).requires_grad_(False)
def update():
    d = next(model.parameters()).device
    x = torch.zeros(4, 640, 64, device=d, requires_grad=True)
    model(x, torch.zeros(4, 128, 64, device=d), torch.zeros(4, 64, device=d), torch.ones(4, device=d),
        torch.zeros(640, 3, device=d), torch.zeros(128, 3, device=d), return_dict=False)[0].mean().backward()
def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = resident("VmRSS:")
update()
grown = resident("VmHWM:") - before
model = model.to("meta")
with fused_attention(), Allocations() as counted:
    update()
print(grown, counted.peak)
"""


@pytest.mark.slow
def test_the_resident_set_grows_by_what_is_counted() -> None:
    """The kernel's own account of a process, some 300 MB, whose allocator returns what is freed at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    grown, counted = map(int, ran.stdout.split())
    assert counted > 250e6
    assert counted == pytest.approx(grown, rel=0.1)


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
    made = DiffusersEngine(shared_models.tiny).generate(request(16))
    assert made.trajectory is not None
    arrays = [made.images, made.trajectory.latents, made.trajectory.log_probs]
    told = ticket_bytes(config, rehearsed_rank(config).shapes)
    text = (128 - len(made.trajectory.conditioning["prompt_embeds"])) * 32 * 4
    assert told - text == sum(a.nbytes for a in [*arrays, *made.trajectory.conditioning.values()])


@pytest.mark.slow
def test_text_encoders_have_the_parameters_that_are_written_down() -> None:
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3Config,
        Qwen3Model,
        T5Config,
        T5EncoderModel,
    )

    large = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    giant = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    with torch.device("meta"):
        clip = CLIPTextModel(CLIPTextConfig(**large))
        projected = CLIPTextModelWithProjection(CLIPTextConfig(**large, projection_dim=768))
        bigger = CLIPTextModelWithProjection(CLIPTextConfig(**giant, projection_dim=1280))
        t5 = T5EncoderModel(
            T5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
        )
        qwen3 = Qwen3Model(
            Qwen3Config(
                hidden_size=2560,
                intermediate_size=9728,
                num_hidden_layers=36,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151936,
            )
        )
        qwen2 = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config={**text, "num_key_value_heads": 4, "vocab_size": 152064},
                vision_config=vision,
                tie_word_embeddings=False,
            )
        )

    def count(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    assert architectures()["Qwen/Qwen-Image"].text_parameters == count(qwen2)
    assert architectures()["stabilityai/stable-diffusion-3.5-medium"].text_parameters == count(projected, bigger, t5)
    assert architectures()["black-forest-labs/FLUX.1-dev"].text_parameters == count(clip, t5)
    assert architectures()["Tongyi-MAI/Z-Image-Turbo"].text_parameters == count(qwen3)
