"""Qwen-Image with random weights that are made on the device: no hub, and no 41 GB of files or host memory."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import structure
from async_flowrl.policies.qwen_image import QwenImageFamily
from async_flowrl.policies.tiny.build import build_tiny

FAMILY = f"{__name__}:RandomQwenImageFamily"
COMMON = """
    experiment=qwen_image_1x80gb model.dtype=bfloat16 reward=color data=two_prompts hand_over=stream prompts_per_step=1
    rollout.num_workers=1 rollout.text_encoder=resident rollout.batch_size=4 algorithm.max_kl_per_update=null
    trainer.num_workers=1 trainer.micro_batch_size=2 trainer.updates_per_batch=1
"""
HEAD_DIM, ROPE_AXES = 128, (16, 56, 56)
"""Qwen-Image's channels per attention head, and how they are divided among the axes of positions."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the work on it."""

    layers: int
    heads: int
    resolution: int
    steps: int
    """Denoising steps per image."""
    images: int
    """Images of a training step."""
    whole_vae: bool
    """True for the VAE of Qwen-Image's size."""


FULL = Sizes(layers=60, heads=24, resolution=512, steps=10, images=4, whole_vae=True)
SMALL = Sizes(layers=2, heads=2, resolution=32, steps=8, images=4, whole_vae=False)
"""Sizes on a CPU and on a pretended device, where no figure counts."""


def real_card() -> bool:
    """Returns True if torch has a GPU that is not a pretended one (tests/pretend_gpu)."""
    return torch.cuda.is_available() and "pretended" not in torch.cuda.get_device_name().lower()


def sizes_here() -> Sizes:
    return FULL if real_card() else SMALL


def settings(work: Path, sizes: Sizes) -> list[str]:
    """Returns the settings of a run with the random model at these sizes; its folder is made in `work` if missing."""
    folder = model_folder(work / "models", sizes)
    own = f"""
        model.path={folder} model.family={FAMILY} rollout.resolution={sizes.resolution}
        rollout.num_inference_steps={sizes.steps} group_size={sizes.images} ticket_size={sizes.images}
    """
    return [*COMMON.split(), *own.split()]


def model_folder(cache: Path, sizes: Sizes) -> Path:
    """Returns a folder with the tiny model's tokenizer and text encoder and a transformer of configuration alone."""
    folder = cache / f"qwen_{sizes.layers}x{sizes.heads}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(build_tiny(TinyConfig(layers=1, heads=1)), folder)
    described = folder / "transformer" / "config.json"
    own = {"num_layers": sizes.layers, "num_attention_heads": sizes.heads}
    shape = {"attention_head_dim": HEAD_DIM, "axes_dims_rope": ROPE_AXES}
    described.write_text(json.dumps(json.loads(described.read_text()) | own | shape))
    for weights in folder.glob("transformer/*.safetensors"):
        weights.unlink()
    if sizes.whole_vae:
        from diffusers import AutoencoderKLQwenImage

        torch.manual_seed(0)
        shutil.rmtree(folder / "vae")
        vae: Any = AutoencoderKLQwenImage(base_dim=96, num_res_blocks=2)
        vae.to(torch.bfloat16).save_pretrained(folder / "vae")
    (folder / "complete").touch()
    return folder


class RandomQwenImageFamily(QwenImageFamily):
    """Qwen-Image whose transformer is drawn from a seed on the device; the other parts are those of the folder."""

    def load(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parts: str,
        revision: str | None = None,
        max_sequence_length: int | None = None,
    ) -> PipelinePolicy:
        """Loads the model; see `PolicyFamily.load`. The bits are equal in all processes on one kind of device."""
        if parts in ("text", "structure"):
            return super().load(path, dtype=dtype, device=device, parts=parts, max_sequence_length=max_sequence_length)
        from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

        from async_flowrl.policies.loading import quiet, settle_pipeline, weight_options

        described = QwenImageTransformer2DModel.load_config(path, subfolder="transformer")
        # A single trainer rank asks for host memory; the bits are those of the device's generator all the same.
        where = torch.device("cuda" if torch.cuda.is_available() else device)
        transformer = filled(structure(QwenImageTransformer2DModel, described, dtype), where).to(device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        without = {"text_encoder": None} if parts in ("cached", "transformer") else {}
        with quiet():
            options = without | weight_options(dtype, None)
            pipeline = QwenImagePipeline.from_pretrained(path, transformer=None, **options)
        settle_pipeline(pipeline, torch.device(device))
        pipeline.register_modules(transformer=transformer)
        return self.around(pipeline, dtype, max_sequence_length=max_sequence_length)


def filled(network: nn.Module, device: torch.device) -> nn.Module:
    """Gives every meta parameter memory on the device: norms are 1, biases 0, matrices N(0, 1 / inputs)."""
    draw = torch.Generator(device).manual_seed(0)
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.ndim < 2:
                values.fill_(0.0 if name == "bias" else 1.0)
            else:
                values.normal_(0.0, parameter.shape[-1] ** -0.5, generator=draw)
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    for buffer in network.buffers():
        buffer.data = buffer.data.to(device)
    return network.eval()
