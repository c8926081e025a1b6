"""Tests of the memory plan against the bytes of real tensors."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprint import Allocations, fused_attention
from async_flowrl.memory.meta_model import MetaModel, build_meta_model
from async_flowrl.memory.peaks import training_peak
from async_flowrl.memory.processes import host_bytes, plan_memory, trainer_footprint
from async_flowrl.plan import __main__ as planner
from async_flowrl.plan.memory import describe
from async_flowrl.policies.architectures import KNOWN
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.sd3 import SD3Policy
from async_flowrl.tickets.arithmetic import ticket_bytes
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.fsdp import World
from tests.support.families import NAMES, adapted, how
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
    assert sharded.parts["gathered blocks"] > max(plan.model.block_bytes)
    assert "fits a device of 79 GiB" in describe(plan, config, 79.0)
    assert plan.trainer.total < plan.rollout.total < 79 * 2**30


def test_what_does_not_fit_is_said_with_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["model=tiny_sd3", "model.tiny.heads=4", "trainer.micro_batch_size=8"]
    small = ["model.tiny.layers=4", "rollout.resolution=128"]
    assert planner.main(["--memory", *plain, *small, "--device", "1"]) == 0
    said = capsys.readouterr().out
    assert "a trainer rank does not fit 1 GiB" in said and "trainer.gradient_checkpointing=full" in said
    deep = [*plain, "model.tiny.layers=6"]
    kept, less, least = (activations(*deep, f"trainer.gradient_checkpointing={how}") for how in CHECKPOINTED)
    assert least < kept / 3 and 0.4 * kept < less < 0.7 * kept
    assert planner.main(["--memory", "model.path=Someone/Unknown", "model.family=flux"]) == 2
    assert "was not found" in capsys.readouterr().err


def activations(*overrides: str) -> int:
    config = compose_config("one_step_off", list(overrides))
    return training_peak(config, build_meta_model(config))


def test_every_placement_is_judged_on_the_same_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """A process with one base takes more than each of two separate ones and less than both together."""
    plain = ["model=tiny_sd3", "model.tiny.layers=3", "model.tiny.heads=16", "trainer.micro_batch_size=8"]
    assert planner.main(["--memory", *plain, "--json"]) == 0
    placed = json.loads(capsys.readouterr().out)["placements"]
    (shared,) = placed["shared"]["processes"].values()
    separate = placed["separate"]["processes"].values()
    assert max(separate) < shared < sum(separate)
    assert all(each["fits"] for each in placed.values())
    between = (shared + max(separate)) / 2 / 2**30
    assert planner.main(["--memory", *plain, "--device", f"{between}"]) == 0
    said = capsys.readouterr().out
    assert ": separate fits (trainer rank" in said and "; shared does not fit (process with one base" in said
    sharded = ["trainer.num_workers=2", "trainer.shard=full", "placement=shared", "rollout.num_workers=2"]
    assert planner.main(["--memory", *plain, *sharded]) == 2
    assert "trainer.shard must be none or auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *((name, "full") for name in NAMES),
        ("qwen_image", "none"),
        *(pytest.param(name, "none", marks=pytest.mark.slow) for name in NAMES if name != "qwen_image"),
        *(pytest.param(name, "every_2", marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_meta_counts_what_a_real_run_allocates(family: str, checkpointing: str) -> None:
    """The same update on the meta device and on real tensors of the same tiny model."""
    config = compose_config("one_step_off", ["model=tiny" if family == "qwen_image" else f"model=tiny_{family}"])
    config.model.tiny.heads, config.lora.rank = 4, 4
    config.rollout.guidance_scale = how(family).guidance_scale
    config.rollout.resolution, config.trainer.micro_batch_size = 128, 2
    config.trainer.gradient_checkpointing = checkpointing
    planned = build_meta_model(config)
    real = adapted(family)
    for parameter in real.transformer.parameters():
        assert parameter.dtype == torch.float32
    live = MetaModel(real, 0, (), 0, 0, 0, 0)  # type: ignore[arg-type]
    assert planned.adapter_parameters == sum(p.numel() for p in lora_parameters(real.transformer).values())
    training_peak(config, live, device="cpu")  # what is made once and kept, rotary tables say, is made before
    counted, expected = training_peak(config, planned), training_peak(config, live, device="cpu")
    assert counted == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sum_of_the_gradients_is_planned_as_a_rank_holds_it(tune: str, ranks: int) -> None:
    config = compose_config("one_step_off", ["model=tiny", f"tune={tune}", f"trainer.num_workers={ranks}"])
    model = build_meta_model(config)
    planned = trainer_footprint(config, model).parts["sum of the gradients"]
    total = ExactSum(model.adapter_parameters, torch.device("cpu"))
    total.reduce(World(0, ranks))
    of_gradients = slice(model.adapter_parameters)  # behind them is the account
    assert sum({t.data_ptr(): t[of_gradients].nbytes for t in (total._values, total._whole)}.values()) == planned


def test_each_stream_of_whole_weights_pins_its_versions() -> None:
    config = compose_config("one_step_off", ["model=tiny", "tune=full", "trainer.ema_decay=null", "evaluate.every=0"])
    model = build_meta_model(config)
    alone = host_bytes(config, model)
    config.evaluate.every = 10
    assert host_bytes(config, model) == alone + alone // (config.live_versions + 2), "the next one to be evaluated"
    config.trainer.ema_decay = 0.9
    assert host_bytes(config, model) == 2 * alone > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_published_model_at_full_size_takes_what_is_planned() -> None:
    """SD3.5-medium in bfloat16 with the recipe's adapter, at 384 px: 7 GB, a minute. Values do not matter."""
    from diffusers import SD3Transformer2DModel

    config = recipe("sd35_ocr", "trainer.micro_batch_size=1", "trainer.gradient_checkpointing=none")
    planned = build_meta_model(config)
    with torch.device("meta"):
        network = SD3Transformer2DModel.from_config(dict(KNOWN[config.model.path].transformer)).eval()
    network = network.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    for tensor in [*network.parameters(), *network.buffers()]:
        tensor.fill_(0.01)
    policy = SD3Policy(
        network, None, side=16, dtype=torch.bfloat16, max_sequence_length=config.model.max_sequence_length
    )
    assert planned.base_bytes == sum(p.numel() * p.element_size() for p in network.parameters())
    add_lora(network, config.lora, policy, seed=0)
    expected = training_peak(config, MetaModel(policy, 0, (), 0, 0, 0, 0), device="cpu")
    assert training_peak(config, planned) == pytest.approx(expected, rel=0.01)


RESIDENT = """
import torch
from diffusers import FluxTransformer2DModel
from async_flowrl.memory.footprint import Allocations, fused_attention
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
    told = ticket_bytes(config, build_meta_model(config).policy.shapes(config.rollout.resolution))
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

    assert KNOWN["Qwen/Qwen-Image"].text_parameters == count(qwen2)
    assert KNOWN["stabilityai/stable-diffusion-3.5-medium"].text_parameters == count(projected, bigger, t5)
    assert KNOWN["black-forest-labs/FLUX.1-dev"].text_parameters == count(clip, t5)
    assert KNOWN["Tongyi-MAI/Z-Image-Turbo"].text_parameters == count(qwen3)
