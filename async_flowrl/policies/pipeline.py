"""Base class of policies, which wrap a diffusers pipeline: schedule, image size, guidance, decoding.

The file of a model family adds the shape of latents, the network's arguments, and the encoding of prompts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_flowrl.config.check import guidance_refusal
from async_flowrl.config.resolution import Resolution, frames_of, height_width, in_pixels, in_words, of_sides
from async_flowrl.image_file import opened
from async_flowrl.types import Conditioning, EncoderInput, Sampling, TextWithImages, TokenIds

# Names of text encoders among a pipeline's components, and of one of images that is used beside them.
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")
# English has about four bytes of text per token, so that estimates are rather too long.
BYTES_PER_TOKEN = 3.0
# Fewest tokens that are planned for a prompt, and the number if the prompts are not on this machine.
USUAL_TOKENS = 128
# Name of an edited image's tokens [rows, columns, channels] among the arrays of a prompt.
IMAGE = "image_{}"
# Area in pixels at which the network gets an image to edit; in Qwen-Image 2.1 its text encoder, too.
IMAGE_AREA = 1024**2
# Keys of configurations of VAEs that list stages. All but the last halve the side; of the first key, all do.
_STAGES = ("temperal_downsample", "encoder_block_out_channels", "block_out_channels")
# diffusers' names of the linear layers in an attention over image and text: four for the image, four for the text.
_IMAGE_ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
JOINT_ATTENTION = (*_IMAGE_ATTENTION, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")


class Shapes(NamedTuple):
    """Shapes of float32 arrays in a rollout, without batch dimension: latents, and conditioning by name."""

    latents: tuple[int, ...]
    conditioning: Mapping[str, tuple[int, ...]]


def scale_factor(vae: Mapping[str, Any], stages: str | None = None) -> int:
    """Returns the side of one latent in pixels, by a key of the VAE's configuration; None: the first that it has."""
    key = stages or next((key for key in _STAGES if key in vae), _STAGES[-1])
    return int(2 ** (len(vae[key]) - (key != "temperal_downsample")))


def estimated_tokens(wording: EncoderInput) -> int:
    """Returns the length of a prompt in tokens, at least USUAL_TOKENS, from its bytes of text or its token ids.

    Images do not count: `conditioning_shapes` of their family adds them.
    """
    wording = wording.text if isinstance(wording, TextWithImages) else wording
    tokens = math.ceil(len(wording.encode()) / BYTES_PER_TOKEN) if isinstance(wording, str) else len(wording)
    return max(tokens, USUAL_TOKENS)


def on_host(**tensors: Tensor) -> Conditioning:
    """Returns the first row of each tensor of a batch as a float32 array."""
    return {name: tensor[0].float().cpu().numpy() for name, tensor in tensors.items()}


def guided_velocity(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Returns u + w (c - u) for velocities c (`conditional`) and u (`unconditional`), all [n, ...] of one dtype.

    `scale` is w, as diffusers' `true_cfg_scale`; 1 gives c up to rounding. Classifier-free guidance, arXiv 2207.12598.
    """
    return unconditional + scale * (conditional - unconditional)


def with_norm_of(conditional: Tensor, guided: Tensor) -> Tensor:
    """Returns `guided` [..., channels], each token scaled to the norm that it has in `conditional`."""
    # QwenImagePipeline does the same, but gives NaN for a token of zeros in `guided`; here it stays zero.
    norm: Tensor = guided.norm(dim=-1, keepdim=True)
    rescale: Tensor = conditional.norm(dim=-1, keepdim=True) / torch.where(norm > 0, norm, 1.0)
    return guided * rescale


def over_white(images: Tensor) -> Tensor:
    """Returns RGB images uint8 [..., 3]; those with transparency, RGBA [..., 4], are laid over white.

    Each value is rounded as Pillow's `Image.paste` with a mask rounds it.
    """
    if images.shape[-1] == 3:
        return images
    color, alpha = images[..., :3].to(torch.int32), images[..., 3:].to(torch.int32)
    weighted = color * alpha + 255 * (255 - alpha) + 128
    return ((weighted + (weighted >> 8)) >> 8).to(torch.uint8)


def squares(latents: Tensor) -> Tensor:
    """Returns latents [n, C, h, w] as tokens of 2 × 2 of them, [n, h / 2, w / 2, 4 C]."""
    return nn.functional.pixel_unshuffle(latents, 2).movedim(1, -1).contiguous()


def from_squares(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns latents [n, C, h, w] of tokens [n, h / 2 · w / 2, 4 C]; `grid` is (h / 2, w / 2)."""
    return nn.functional.pixel_shuffle(tokens.mT.contiguous().reshape(len(tokens), -1, *grid), 2)


@contextmanager
def untiled(vae: Any) -> Iterator[None]:
    """Context in which a VAE encodes images as a whole, whatever `rollout.vae_tiling` says of decoding.

    Tiles would give other latents.
    """
    tiles, vae.use_tiling = vae.use_tiling, False
    try:
        yield
    finally:
        vae.use_tiling = tiles


def with_euler_steps(scheduler: Any) -> Any:
    """Returns the scheduler, or for a multistep solver, which has a `flow_shift`, an Euler scheduler of its shift."""
    if (shift := scheduler.config.get("flow_shift")) is None:
        return scheduler
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


class PipelinePolicy(ABC):
    """A flow-matching network with schedule, guidance, text encoders and VAE. Latents are [n, ...] in any layout.

    It wraps a diffusers pipeline; without one (in the trainer) it cannot encode or decode. `family` is its family's
    name in the registry. `transformer` is the only module that is trained; a LoRA is attached to it as PEFT adapter
    `default`, to the linear layers whose names end in one of `lora_targets` (the default of `lora.targets`).
    """

    family: ClassVar[str]
    transformer: nn.Module
    lora_targets: Sequence[str]
    # docs/extending/model.md explains these and the optional methods. Name of the model in messages:
    title: ClassVar[str]
    # Smallest number of denoising steps for which the model's schedule exists.
    least_steps: ClassVar[int] = 1
    # Image sides must be a multiple of this many pixels, and of the size of an image token.
    size_step: ClassVar[int] = 1
    # True: latents are [tokens, channels]; False: [channels, h, w].
    packs_tokens: ClassVar[bool] = False
    # True: `patch_size` of the network's configuration is the side of a token in latents; False: it is 2.
    names_patch_size: ClassVar[bool] = False
    # Key of the VAE's configuration that lists its stages; KeyError for a VAE without it, which is another model's.
    vae_stages: ClassVar[str] = "block_out_channels"
    has_system_prompt: ClassVar[bool] = False
    # True: the model makes videos, of `rollout.frames` frames.
    makes_videos: ClassVar[bool] = False
    # True: the texts of all prompts have one length.
    pads_texts: ClassVar[bool] = False
    # Fewest and most images that a prompt brings to be edited.
    images: ClassVar[tuple[int, float]] = (0, 0)
    # False: guidance leads away from the empty text, and from no other.
    takes_negative: ClassVar[bool] = True
    # Marks of images and videos in the text encoder's template, which texts must not have.
    marks: ClassVar[tuple[str, ...]] = ()
    # Largest `max_sequence_length` of the diffusers pipeline; None if it takes any.
    most_tokens: ClassVar[int | None] = None
    # Tokens of a prompt of `conditioning_shapes` where prompts are not padded to one length; a plan sets it.
    planned_tokens: int = USUAL_TOKENS
    # Images of a prompt of `conditioning_shapes`, as few as there may be; a plan sets it.
    planned_images: int
    # Size of the videos of `conditioning_shapes`, if images are encoded for it; a plan sets it.
    planned_size: Resolution = (81, 480, 832)
    # Argument of the diffusers pipeline for the scale of classifier-free guidance.
    stock_guidance: ClassVar[str] = "true_cfg_scale"

    def __init__(
        self,
        transformer: nn.Module,
        scheduler: Any,
        *,
        side: int,
        dtype: torch.dtype,
        pipeline: Any | None = None,
        max_sequence_length: int | None = None,
    ) -> None:
        """`side` is the side of an image token in pixels, `dtype` that of the network's inputs. Raises ValueError.

        `max_sequence_length` is the longest prompt in tokens; None means the pipeline's default.
        """
        scheduler = None if scheduler is None else with_euler_steps(scheduler)
        if scheduler is not None and scheduler.config.get("stochastic_sampling"):
            raise ValueError(
                "scheduler_config.json of the model has stochastic_sampling=true, with which diffusers draws noise of "
                "its own: set it to false, as this project draws noise from named seeds (algorithm.sde_type)"
            )
        self.transformer, self.planned_images = transformer, self.images[0]
        self._scheduler, self._side, self._dtype, self.pipeline = scheduler, side, dtype, pipeline
        self._config = cast("Any", transformer).config
        self._text_options = {} if max_sequence_length is None else {"max_sequence_length": max_sequence_length}
        self._schedules: dict[tuple[int, int], Tensor] = {}
        self._known_statistics: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        longest, length = self.longest_text, max_sequence_length
        if length is not None and longest is not None and length > longest:
            raise ValueError(f"model.max_sequence_length must be at most {longest} for {self.title}, got {length}")

    @property
    def lora_exclude(self) -> str | None:
        """Regular expression for the full names of layers that cannot change the output, and so get no LoRA."""
        return None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer's blocks in forward order: units of FSDP, torch.compile and gradient checkpointing."""
        return list(cast("nn.ModuleList", self.transformer.transformer_blocks))

    @property
    def experts(self) -> Sequence[str]:
        """Names of the parts of the transformer, all alike, of which a noise level uses one; () if it uses all of it.

        A part that no row of an optimizer step used is left as it is by this step.
        """
        return ()

    def stock_latents(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns initial latents in the shape in which the stock pipeline takes them as its argument `latents`."""
        return latents

    @property
    def embeds_guidance(self) -> bool:
        """True if the network takes `guidance_scale` as an input (a guidance-distilled model)."""
        return False

    @property
    def text_encoders(self) -> Sequence[nn.Module]:
        """The modules that only `encode` uses; `encode` runs on their device. Empty if they are not loaded."""
        encoders = [getattr(self.pipeline, name, None) for name in TEXT_ENCODERS]
        return [encoder for encoder in encoders if encoder is not None]

    @torch.no_grad()
    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Returns the conditioning of each text: float32 arrays without batch dimension, named as in the pipeline.

        `negative=True` encodes a negative prompt. `system` replaces the system prompt of the family's template.
        Raises ValueError for a system prompt or token ids if the family does not support them, and RuntimeError in a
        process without text encoders.
        """
        # One text at a time, because padding to the length of another text would change the last bits.
        self.whole("encode prompts")
        if system is not None and not self.has_system_prompt:
            raise ValueError(f"{self.title} has no system prompt, got {system!r}")
        encode = self._encode_negative if negative else self._encode_one
        return [self._encoded(text, encode) for text in texts]

    def _encoded(self, text: EncoderInput, encode: Callable[[str], Conditioning]) -> Conditioning:
        self.check_images(len(text.images) if isinstance(text, TextWithImages) else 0)
        if isinstance(text, TextWithImages):
            return self._encode_with_images(text.text, [opened(image) for image in text.images])
        return encode(text) if isinstance(text, str) else self._encode_ids(text)

    @classmethod
    def check_images(cls, count: int) -> None:
        """Raises ValueError if a prompt cannot have so many images."""
        least, most = cls.images
        if not least <= count <= most:
            takes = f"needs at least {least} image" if count < least else f"takes at most {most} image"
            takes = takes if most else "makes images from text alone"
            where = "columns image and images, data.images; of generate, --image"
            raise ValueError(f"{cls.title} {takes}, and the prompt has {count} ({where})")

    @classmethod
    def check_marks(cls, *texts: str | None, negative: str | None = None) -> None:
        """Raises ValueError for a text with one of `marks`, and for a negative prompt that is not used."""
        if not cls.takes_negative and negative and negative.strip():
            raise ValueError(
                f"{cls.title} takes no negative prompt, nor does its stock pipeline: leave out rollout.negative_prompt "
                f"and the column negative_prompt, got {negative!r:.80}"
            )
        for text in filter(None, (*texts, negative)):
            if found := [mark for mark in cls.marks if mark in text]:
                raise ValueError(
                    f"{cls.title} puts {found[0]} in the place of images, no text may have it: {text!r:.80}"
                )

    def _stock_encode(self, text: str, *arguments: Any, **options: Any) -> Any:
        pipeline = self.whole("encode prompts")
        options |= self._text_options
        return pipeline.encode_prompt(text, *arguments, device=pipeline.text_encoder.device, **options)

    @abstractmethod
    def _encode_one(self, text: str) -> Conditioning: ...

    def _encode_negative(self, text: str) -> Conditioning:
        return self._encode_one(text)

    def _encode_ids(self, ids: TokenIds) -> Conditioning:
        raise ValueError(f"{self.title} takes prompts as text, got {len(ids)} token ids")

    def _encode_with_images(self, text: str, images: Sequence[Any]) -> Conditioning:
        raise NotImplementedError  # Only families whose `images` are not (0, 0) have it.

    def encode_image(self, image: Tensor) -> Tensor:
        """Returns the network's tokens [1, rows, columns, channels] of an image to edit, [1, 3, H, W] from -1 to 1."""
        raise NotImplementedError

    def image_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tokens of `planned_images` images to edit, for `conditioning_shapes`."""
        side = math.isqrt(IMAGE_AREA) // self._side
        shape = side, side, int(self._config.in_channels)
        return {IMAGE.format(place): shape for place in range(self.planned_images)}

    @abstractmethod
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes that `encode` gives for a prompt of `planned_tokens`; used only to estimate sizes."""

    def _text_tokens(self, usual: int) -> int:
        return int(self._text_options.get("max_sequence_length", usual))

    def sigmas(self, num_inference_steps: int, resolution: Resolution) -> Tensor:
        """Returns the pipeline's own noise levels, float32 [T+1] on the CPU, from exactly 1 down to exactly 0.

        Raises ValueError for too few steps, and for levels not from 1 to 0.
        """
        self.check_steps(num_inference_steps)
        key = num_inference_steps, math.prod(self._grid(resolution))
        if key not in self._schedules:
            self._set_schedule(*key)
            sigmas = cast("Tensor", self._scheduler.sigmas).to("cpu", torch.float32).clone()
            if sigmas[0] != 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
                raise ValueError(f"the model's scheduler gives no schedule that falls from 1 to 0: {sigmas.tolist()}")
            self._schedules[key] = sigmas
        return self._schedules[key].clone()

    @classmethod
    def check_steps(cls, num_inference_steps: int) -> None:
        if num_inference_steps < cls.least_steps:
            least = f"num_inference_steps must be at least {cls.least_steps} for {cls.title}'s schedule"
            raise ValueError(f"{least}, got {num_inference_steps}")

    def _time(self, sigma: Tensor) -> Tensor:
        return sigma if self._dtype == torch.float32 else (1000 * sigma).to(self._dtype) / 1000

    def _set_schedule(self, steps: int, tokens: int) -> None:
        # The functions of the pipelines for it would bring the whole pipeline and its text encoder into a trainer.
        sigmas, mu = np.linspace(1.0, 1 / steps, steps), self._shift(tokens, steps)
        self._scheduler.set_timesteps(sigmas=sigmas, device="cpu", mu=mu)

    def _shift(self, tokens: int, steps: int) -> float:
        config = self._scheduler.config
        least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (most - least)
        return float(tokens * slope + (config.get("base_shift", 0.5) - slope * least))

    def _grid(self, resolution: Resolution) -> tuple[int, int]:
        """Returns rows and columns of image tokens. Raises ValueError, with the nearest or the largest size."""
        if (frames := frames_of(resolution)) is not None and not self.makes_videos:
            raise ValueError(
                f"frames must be left out (rollout.frames, prompts): {self.title} makes images, got {frames}"
            )
        (height, width), step = height_width(resolution), math.lcm(self._side, self.size_step)
        if height % step or width % step:
            kind = "a multiple" if isinstance(resolution, int) else "multiples"
            nearest = in_words(of_sides(*(step * max(1, round(side / step)) for side in (height, width))))
            raise ValueError(f"resolution must be {kind} of {step}, got {in_words(resolution)}, nearest: {nearest}")
        grid, largest = (height // self._side, width // self._side), self.largest_grid
        if largest is not None and any(a > b for a, b in zip(grid, largest, strict=True)):
            most = in_words(of_sides(*(self._side * tokens for tokens in largest)))
            raise ValueError(
                f"resolution must be at most {most} px for {self.title}, whose network has no positions beyond that, "
                f"got {in_words(resolution)}"
            )
        return grid

    @property
    def longest_text(self) -> int | None:
        return self.most_tokens

    @property
    def largest_grid(self) -> tuple[int, int] | None:
        """Most rows and columns of image tokens for which the network has positions; None: any number of them."""
        return None

    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
        """Returns the shape of one image's latents, without batch dimension."""
        (rows, columns), channels = self._grid(resolution), int(self._config.in_channels)
        if self.packs_tokens:
            return rows * columns, channels
        side = int(self._config.patch_size) if self.names_patch_size else 2
        return channels, side * rows, side * columns

    def shapes(self, resolution: Resolution) -> Shapes:
        self.planned_size = resolution
        return Shapes(self.latent_shape(resolution), self.conditioning_shapes())

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        sampling: Sampling,
    ) -> Tensor:
        """Returns the velocity eps - x0 with guidance, float32 [n, ...]. Rollout and training call the same function.

        `latents` is [n, ...] and `sigma` their noise levels, float32 [n], which may differ per row. `positive` and
        `negative` hold the conditioning of one prompt, without batch dimension, for all n rows; with true CFG both get
        gradients, in one batch or two (`in_two_passes`). ValueError for latents of another size, or no `negative`.
        """
        if tuple(latents.shape[1:]) != self.latent_shape(sampling.resolution):
            raise ValueError(f"latents {tuple(latents.shape)} are not those of {in_pixels(sampling.resolution)}")
        if sampling.true_cfg_scale > 1 and negative is None:
            raise ValueError(f"true_cfg_scale {sampling.true_cfg_scale} needs the negative prompt's conditioning")
        return self.velocity_of(latents, sigma, [positive], [] if negative is None else [negative], sampling)

    def velocity_of(
        self,
        latents: Tensor,
        sigma: Tensor,
        positives: Sequence[Mapping[str, Tensor]],
        negatives: Sequence[Mapping[str, Tensor]],
        sampling: Sampling,
    ) -> Tensor:
        """Returns what `velocity` returns for the rows of several prompts, which are divided evenly among them.

        With true CFG, `negatives` holds the negative prompt of each; in one batch they follow all prompts.
        """
        if sampling.true_cfg_scale <= 1:
            return self._by_layout(latents, sigma, positives, sampling)
        if self.in_two_passes(latents.device):
            conditional = self._by_layout(latents, sigma, positives, sampling)
            unconditional = self._by_layout(latents, sigma, negatives, sampling)
        else:
            rows = torch.cat([latents, latents]), torch.cat([sigma, sigma])
            conditional, unconditional = self._by_layout(*rows, [*positives, *negatives], sampling).chunk(2)
        return self._guide(conditional, unconditional, self._scale(sigma, sampling))

    def _by_layout(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        # A network has one layout for all rows of a call.
        if len({self._layout(branch) for branch in branches}) == 1:
            return self._network(latents, sigma, branches, sampling)
        parts = zip(latents.chunk(len(branches)), sigma.chunk(len(branches)), branches, strict=True)
        return torch.cat([self._network(x, level, [branch], sampling) for x, level, branch in parts])

    def _layout(self, branch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Returns what is equal for prompts that share a call of the network: the sizes of their images."""
        return tuple(branch[name].shape for name in sorted(branch) if name.startswith(IMAGE.format("")))

    def in_two_passes(self, device: torch.device) -> bool:
        """Returns True if guidance makes a forward pass for prompts and one for negative prompts.

        It depends on no prompt, because trainer ranks that share a base must make as many passes as each other.
        """
        # In one batch a shorter text would be padded and masked, and on CUDA a mask prevents flash attention.
        return device.type == "cuda" and not self.pads_texts

    def _scale(self, sigma: Tensor, sampling: Sampling) -> float | Tensor:
        """Returns the scale of classifier-free guidance, which may be a tensor that broadcasts to latents [n, ...]."""
        return sampling.true_cfg_scale

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError, one sentence, for guidance settings that the network does not support."""
        if refusal := guidance_refusal("rollout.true_cfg_scale", sampling.true_cfg_scale):
            raise ValueError(refusal)
        scale = sampling.guidance_scale
        if (scale > 0) != self.embeds_guidance:
            value, hint = ("above 0", "it is a network input") if self.embeds_guidance else ("0", "use true_cfg_scale")
            raise ValueError(f"rollout.guidance_scale must be {value} for {self.title}, got {scale}; {hint}")
        if sampling.true_cfg_scale_2 is not None and not self.experts:
            raise ValueError(
                f"rollout.true_cfg_scale_2 is for models with two experts (Wan 2.2), {self.title} has one network, got "
                f"{sampling.true_cfg_scale_2}: leave it out"
            )

    def _guide(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        return guided_velocity(conditional, unconditional, scale)

    @abstractmethod
    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor: ...

    def _called(self, **inputs: Any) -> Tensor:
        return cast("Tensor", self.transformer(**inputs, return_dict=False)[0]).float()

    def _rows(self, branches: Sequence[Mapping[str, Tensor]], name: str, rows: int) -> Tensor:
        tensors = [branch[name].to(self._dtype) for branch in branches]
        return torch.cat([tensor.expand(rows // len(branches), *tensor.shape) for tensor in tensors])

    def _edited(self, branches: Sequence[Mapping[str, Tensor]], rows: int) -> list[Tensor]:
        """Returns the tokens [rows, height, width, channels] of each image to edit."""
        count = sum(name.startswith(IMAGE.format("")) for name in branches[0])
        return [self._rows(branches, IMAGE.format(place), rows) for place in range(count)]

    @torch.no_grad()
    def decode(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns images uint8 [n, H, W, 3] of final latents, on their device, or videos [n, frames, H, W, 3].

        They are rounded as by diffusers' image processor. RuntimeError without a loaded VAE.
        """
        images = self._processed(latents, resolution)
        return over_white((images.movedim(-3, -1).float() * 255).round().to(torch.uint8))

    def pixels(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns the images of final latents before rounding, float32 [n, 3, H, W] in 0 .. 1, with their gradient."""
        images = self._processed(latents, resolution).float()
        color, alpha = images[:, :3], images[:, 3:]
        return color * alpha + 1.0 - alpha if alpha.shape[1] else color

    def _processed(self, latents: Tensor, resolution: Resolution) -> Tensor:
        # Images [n, C, H, W], videos [n, frames, C, H, W], in 0 .. 1.
        pipeline = self.whole("decode images")
        decoded = self._decoded(pipeline, latents, resolution)
        # Videos are [n, 3, frames, H, W]; their frames are processed as images.
        frames = decoded.movedim(2, 1).flatten(0, 1) if decoded.ndim == 5 else decoded
        processor = getattr(pipeline, "video_processor", None) or pipeline.image_processor
        images: Tensor = processor.postprocess(frames, output_type="pt")
        return images.reshape(len(decoded), -1, *images.shape[1:]) if decoded.ndim == 5 else images

    def decode_by_parts(self, *, images: bool, tiles: bool) -> None:
        """Makes the VAE decode one image, or large images in overlapping tiles, at a time, to save memory.

        Blending of tiles changes some pixels. Raises ValueError if the VAE does not support it.
        """
        vae = self.whole("decode images").vae
        for name, wanted in (("slicing", images), ("tiling", tiles)):
            if wanted and not hasattr(vae, f"enable_{name}"):
                raise ValueError(f"rollout.vae_{name}=true: {self.title}'s {type(vae).__name__} has no enable_{name}")
            if wanted:
                getattr(vae, f"enable_{name}")()

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        scaled = self._unpacked(pipeline, latents, resolution).to(vae.dtype) / vae.config.get("scaling_factor", 1.0)
        shift = vae.config.get("shift_factor") or 0.0  # older VAEs have none
        return cast("Tensor", vae.decode(scaled + shift, return_dict=False)[0])

    def _unpacked(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        return latents

    def _statistics(self, config: Any, like: Tensor) -> list[Tensor]:
        """Returns mean and deviation of each channel of latents of a video VAE [n, C, frames, h, w], as `like`."""
        kind = like.device, like.dtype
        if kind not in self._known_statistics:
            self._known_statistics[kind] = [
                torch.tensor(values, device=like.device, dtype=like.dtype).view(1, -1, 1, 1, 1)
                for values in (config.latents_mean, config.latents_std)
            ]
        return self._known_statistics[kind]

    def _mode(self, image: Tensor) -> Tensor:
        """Returns the VAE's latents of an image from -1 to 1, without any noise or scale."""
        vae = self.whole("encode images").vae
        with untiled(vae):
            return cast("Tensor", vae.encode(image.to(vae.device, self._dtype)).latent_dist.mode())

    def _encoded_image(self, image: Tensor) -> Tensor:
        """Returns latents [1, C, h, w] of a video VAE for an image [1, channels, H, W] from -1 to 1."""
        latents = self._mode(image.unsqueeze(2))
        mean, std = self._statistics(self.whole("encode images").vae.config, latents)
        return ((latents - mean) / std)[:, :, 0]

    def whole(self, purpose: str) -> Any:
        if self.pipeline is None:
            raise RuntimeError(f"`load` made this policy without a pipeline, so it cannot {purpose}")
        return self.pipeline

    @classmethod
    def pixels_per_token(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> int:
        return scale_factor(vae, cls.vae_stages) * (int(transformer["patch_size"]) if cls.names_patch_size else 2)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        return {
            cls.stock_guidance: sampling.true_cfg_scale,
            "negative_prompt": sampling.negative_prompt if sampling.true_cfg_scale > 1 else None,
        }
