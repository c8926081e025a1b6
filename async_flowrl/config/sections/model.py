"""The section `model` of the configuration: the base model, and the tiny one."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import MAX_SEED, NOTHING, ROUNDING, setting


@dataclass
class TinyConfig:
    """The tiny model with random weights that `model.path=tiny` builds."""

    family: str = "qwen_image"
    """qwen_image, sd3, flux, z_image or sana, or `pkg.module:attr` of your own."""
    layers: int = setting(2, at_least=1)
    """Transformer blocks, of each kind that the family has."""
    heads: int = setting(8, at_least=1)
    """Attention heads of 16 channels each."""
    contrast: float = setting(3.0, above=0)
    """Factor on the VAE's last convolution; it raises the contrast of images, which a random VAE makes nearly grey."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of the random weights."""


@dataclass
class ModelConfig:
    """The base model: the same for rollout and trainer."""

    path: str = "tiny"
    """`tiny` (built offline and kept in $ASYNC_FLOWRL_CACHE, or ~/.cache/async_flowrl), a local diffusers folder, or a
    hub name such as Qwen/Qwen-Image."""
    revision: str | None = None
    """Revision on the hub; null takes the newest one, and the run records its commit."""
    family: str = setting("auto", changes=NOTHING)
    """Name in the policies registry, or `pkg.module:attr` of your own; `auto` reads it from model_index.json."""
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype in which the network computes; auto = the dtype of the transformer's files. Latents and noise levels are
    always float32."""
    max_sequence_length: int | None = setting(None, at_least=1)
    """Text tokens to which prompts are padded or cut, if the family does; null = the diffusers pipeline's default."""
    attention_backend: str | None = setting(None, changes=ROUNDING)
    """Attention backend of diffusers, e.g. flash or _native_cudnn; null = torch's own choice of kernel."""
    tiny: TinyConfig = field(default_factory=TinyConfig)
