"""The model family Qwen-Image 2.1: one sequence of text and images, latents [tokens, 64], VAE of RGBA.

Images to edit stand within the text, where the text encoder saw them; it and the VAE get them at one size.
"""

import math
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import IMAGE, IMAGE_AREA, PipelinePolicy, estimated_tokens, on_host
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.qwen_image_edit import IMAGE_MARK, VIDEO_MARK, processor
from async_flowrl.types import Conditioning, Prompt, Sampling

# Positions that diffusers' QwenImage21Rope has tables of: text and images from 0 up, and half an image below 0.
_POSITIONS, _BELOW_ZERO = 8192, 1024
_SLOT = 4  # Latents of an image that one place of `img_mask` stands for.
_PROCESSOR = "processor"
_VISION = ("<|vision_start|>", "<|vision_end|>", IMAGE_MARK, VIDEO_MARK)
# Name among the arrays of a prompt: the text before an image [L, D].
_BEFORE = "before_{}"
_TEXT_TOKENS_PER_IMAGE = 16  # More than there are in the template around an image.
# The part of the published chat template that the pipeline uses.
_TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


class QwenImage21Policy(PipelinePolicy):
    family, title, size_step = "qwen_image_21", "Qwen-Image 2.1", 32
    # With one step, stretching the schedule to its terminal value would divide by zero.
    least_steps = 2
    vae_stages = "temperal_downsample"
    packs_tokens = names_patch_size = True
    images = (0, math.inf)
    marks = (IMAGE_MARK, VIDEO_MARK)
    # Every linear layer of a block; text and image share them, so each of them changes the output.
    lora_targets: Sequence[str] = (
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"img_mlp.{layer}" for layer in ("proj", "gate_layer", "out")),
    )

    def __init__(
        self, transformer: nn.Module, scheduler: Any, *, max_sequence_length: int | None = None, **options: Any
    ) -> None:
        super().__init__(transformer, scheduler, **options)
        if max_sequence_length is not None:
            raise ValueError(f"{self.title} reads whole prompts: leave model.max_sequence_length out")
        cast("Any", transformer).forward = MethodType(_forward, transformer)

    @property
    def largest_grid(self) -> tuple[int, int]:
        return 2 * _BELOW_ZERO, 2 * _BELOW_ZERO

    def _encode_one(self, text: str) -> Conditioning:
        embeds = self._stock_encode(text)[0][0, : _POSITIONS - 1]
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def _encode_with_images(self, text: str, images: Sequence[Any]) -> Conditioning:
        """Returns the text before each image, each image's tokens, and the text after them as prompt_embeds."""
        pipeline = self.whole("encode prompts")
        seen, encoded = [], {}
        for place, image in enumerate(images):
            height, width = condition_size(image.height, image.width)
            picture = image.convert("RGBA")
            seen.append(pipeline.image_processor.resize(picture, height=height, width=width))
            pixels = pipeline.image_processor.preprocess(picture, height=height, width=width)
            encoded[IMAGE.format(place)] = self.encode_image(pixels)
        embeds, _, slots = self._stock_encode(text, seen)
        start, places = 0, slots[0].tolist()
        groups = [math.prod(image.shape[1:3]) // _SLOT for image in encoded.values()]
        if sum(places) != sum(groups):
            raise ValueError(
                f"{self.title}'s text encoder sees the images at {sum(places)} places, its network at {sum(groups)}: "
                "preprocessor_config.json of the model has other sizes than the published one"
            )
        for place, group in enumerate(groups):
            begin = places.index(True, start)
            encoded[_BEFORE.format(place)] = embeds[:, start:begin]
            start = begin + group
        arrays = on_host(**encoded, prompt_embeds=embeds[:, start:])
        _check_positions(_positions_of({name: array.shape for name, array in arrays.items()}))
        return arrays

    def encode_image(self, image: Tensor) -> Tensor:
        if image.shape[1] == 3:  # Opaque.
            image = torch.cat([image, torch.ones_like(image[:, :1])], dim=1)
        return self._encoded_image(image).permute(0, 2, 3, 1)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self._config.context_in_dim
        shapes: dict[str, tuple[int, ...]] = {"prompt_embeds": (self.planned_tokens, width)}
        for place, (name, image) in enumerate(self.image_shapes().items()):
            shapes |= {_BEFORE.format(place): (_TEXT_TOKENS_PER_IMAGE, width), name: image}
        return shapes

    def in_two_passes(self, device: torch.device) -> bool:
        return True  # See `_layout`.

    def _layout(self, branch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        # A text's length decides where the image stands: texts of different lengths never share a call, either.
        return tuple((name, branch[name].shape) for name in sorted(branch))

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        rows, tokens = len(latents), latents.shape[1]
        edited = self._edited(branches, rows)
        texts = [self._rows(branches, _BEFORE.format(place), rows) for place in range(len(edited))]
        texts.append(self._rows(branches, "prompt_embeds", rows))
        grids = [*(tuple(image.shape[1:3]) for image in edited), self._grid(sampling.resolution)]
        if edited:  # Our own `_forward` reads the layout from numbers that the host knows.
            layout: dict[str, Any] = {"text_lengths": [text.shape[1] for text in texts]}
        else:
            places = torch.arange(texts[0].shape[1] + tokens // _SLOT, device=latents.device)
            layout = {"img_mask": (places >= texts[0].shape[1]).expand(rows, -1)}
        return self._called(
            hidden_states=torch.cat([*(image.flatten(1, 2) for image in edited), latents.to(self._dtype)], dim=1),
            timestep=self._time(sigma),
            encoder_hidden_states=torch.cat(texts, dim=1),
            img_shapes=[[(1, *grid) for grid in grids]] * rows,
            **layout,
        )[:, -tokens:]

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        unpacked = pipeline._unpack_latents(latents, *height_width(resolution), pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = self._statistics(vae.config, unpacked)
        return cast("Tensor", vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0])


def _forward(network: Any, *arguments: Any, text_lengths: Sequence[int] | None = None, **inputs: Any) -> Any:
    """Replaces diffusers' `forward` where the layout is known without looking: of text and one image, or as given.

    `text_lengths` has the tokens of text before each image of `img_shapes`; `encoder_hidden_states` then has no places
    for images. diffusers reads the layout from `img_mask` in every call, and the host waits for the device each time; a
    rehearsal has no values to read. Other calls, such as those with the stock pipeline's cache, go to diffusers.
    """
    special = ("kv_cache", "encoder_hidden_states_mask", "attention_kwargs")
    unknown = text_lengths is None and (arguments or len(inputs["img_shapes"][0]) > 1)
    if unknown or any(inputs.get(name) is not None for name in special):
        return type(network).forward(network, *arguments, **inputs)
    latents, text = network.img_in(inputs["hidden_states"]), network.txt_in(inputs["encoder_hidden_states"])
    shapes, modulated = inputs["img_shapes"][0], None
    lengths = [text.shape[1]] if text_lengths is None else list(text_lengths)
    images = latents.split([math.prod(shape) for shape in shapes], dim=1)
    parts = [part for pair in zip(text.split(lengths, dim=1), images, strict=True) for part in pair]
    joint, segments, start = torch.cat(parts, dim=1), [], 0
    for place, part in enumerate(parts[:-1]):
        segments.append((start, start + part.shape[1], place % 2 == 0))
        start += part.shape[1]
    time = inputs["timestep"].to(latents.dtype)
    if network.config.causal_condition:  # The text is modulated by an additional row, of time 0.
        time = torch.cat([time, time.new_zeros(1)])
        modulated = torch.arange(joint.shape[1], device=joint.device) >= start
    embedded = network.time_text_embed(time, latents)
    options: dict[str, Any] = {
        "modulation": network.modulation(embedded),
        "rotary_emb": _positions(network.pos_embed, lengths, shapes, joint.device),
        "target_token_mask": modulated,
        "segments": segments,
    }
    for block in network.transformer_blocks:
        joint = block(joint, **options)
    output = network.proj_out(network.norm_out(joint, embedded, modulated))
    return output if inputs.get("return_dict", True) else (output,)


def _positions(
    table: Any, lengths: Sequence[int], shapes: Sequence[tuple[int, int, int]], device: torch.device
) -> Tensor:
    """Returns QwenImage21Rope's frequencies, complex [tokens, D/2], of texts with an image after each."""
    table.freqs = [frequencies.to(device) for frequencies in table.freqs]
    frames, *axes = table.freqs
    parts, position = [], 0
    for length, (_, height, width) in zip(lengths, shapes, strict=True):
        parts.append(torch.cat([frequencies[position : position + length] for frequencies in table.freqs], dim=-1))
        position += length
        rows, columns = (
            torch.cat([f[len(f) - (side - side // 2) :], f[: side // 2]])
            for f, side in zip(axes, (height, width), strict=True)
        )
        image = (frames[position], rows[:, None], columns[None])
        parts.append(torch.cat([f.expand(height, width, -1) for f in image], dim=-1).flatten(0, 1))
        position += max(height, width)
    return torch.cat(parts)


def condition_size(height: int, width: int) -> tuple[int, int]:
    """Returns height and width at which an image is edited, by the stock pipeline's rule."""
    from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21 as stock

    columns, rows, _ = stock.calculate_dimensions(IMAGE_AREA, width / height)
    return rows, columns


def _positions_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    # An image takes as many positions as its larger side has tokens.
    return sum(max(shape[:2]) if name.startswith(IMAGE.format("")) else shape[0] for name, shape in shapes.items())


def _check_positions(count: int) -> None:
    if count >= _POSITIONS:
        raise ValueError(
            f"{QwenImage21Policy.title} has {_POSITIONS - 1} positions for text and images of a prompt, got {count}"
        )


def text_processor() -> Any:
    """Returns the class of Qwen3-VL's processor for texts alone; the whole one needs torchvision for its videos."""
    from transformers import ProcessorMixin, Qwen3VLProcessor

    class TextProcessor(Qwen3VLProcessor):  # type: ignore[misc]
        def __init__(self, tokenizer: Any = None, chat_template: str | None = None) -> None:
            self.image_token, self.video_token = _VISION[2:]
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(list(_VISION[2:]))
            ProcessorMixin.__init__(self, tokenizer=tokenizer, chat_template=chat_template)

    # A folder that a pipeline is saved to names the class of transformers.
    TextProcessor.__name__, TextProcessor.__module__ = Qwen3VLProcessor.__name__, Qwen3VLProcessor.__module__
    return TextProcessor


class QwenImage21Family(PipelineFamily):
    policy = QwenImage21Policy
    pipeline, transformer = "QwenImage21Pipeline", "QwenImage21Transformer2DModel"
    since = "0.41"
    tokenizer = _PROCESSOR
    text_tokens = _POSITIONS - 1
    # The defaults of QwenImage21Pipeline.__call__, diffusers 0.42.
    usual_guidance = 1.0, 0.0
    usual_steps = 40

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        """The prompt stands in a template, whose system prompt is left out of the limit."""
        from diffusers import QwenImage21Pipeline

        bare = QwenImage21Pipeline(None, None, None, text_processor()(tokenizer, tokenizer.chat_template), None)
        template = bare.prompt_template_t2i
        return template.format(text), template.index("{}"), bare._drop_idx + limit

    def own_parts(self, path: str | None, revision: str | None = None) -> dict[str, Any]:
        from transformers import Qwen3VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        if path is None:
            return {_PROCESSOR: tiny_processor()}
        texts, images = (
            kind.from_pretrained(path, subfolder=_PROCESSOR, revision=revision)
            for kind in (text_processor(), Qwen2VLImageProcessorPil)
        )
        return {_PROCESSOR: processor(Qwen3VLProcessor, images, texts.tokenizer, texts.chat_template)}

    def check_length(self, prompt: Prompt, tokenizer: Any | None, side: int) -> None:
        sides = (max(condition_size(*image.size)) // 16 for image in prompt.images)
        images = sum(sides) + _TEXT_TOKENS_PER_IMAGE * (len(prompt.images) + 1)
        for text in filter(None, (prompt.text, prompt.negative)):
            # A token is a byte at least.
            if len(text.encode()) + images >= _POSITIONS:
                tokens = estimated_tokens(text) if tokenizer is None else len(tokenizer(text).input_ids)
                _check_positions(tokens + images)


def tiny_processor() -> Any:
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    # As published for Qwen3-VL.
    images = Qwen2VLImageProcessorPil(
        patch_size=16,
        size={"shortest_edge": 65_536, "longest_edge": 16_777_216},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return processor(Qwen3VLProcessor, images, tiny_tokenizer(), _TINY_TEMPLATE)


def tiny_tokenizer() -> Any:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tiny.byte_tokenizer(additional_special_tokens=[*tiny.SPECIAL, *_VISION], **special)


def tiny_pipeline(config: TinyConfig) -> Any:
    import diffusers

    images_and_texts = tiny_processor()
    transformer = diffusers.QwenImage21Transformer2DModel(
        **tiny.blocks(config),
        context_in_dim=tiny.TEXT_DIM,
        axes_dims_rope=(4, 4, 8),
    )
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, dim_mult=[1] * 5, num_res_blocks=1)
    with torch.no_grad():
        # The gates of random blocks are nearly shut, and the image passes by them.
        transformer.modulation[1].weight.mul_(4)
        transformer.img_in.weight.mul_(0.25)
    return diffusers.QwenImage21Pipeline(
        scheduler=tiny.qwen_image_scheduler(),
        vae=tiny.contrasted(vae, config.contrast),
        text_encoder=tiny_text_encoder(images_and_texts.tokenizer).eval(),
        processor=images_and_texts,
        transformer=transformer.eval(),
    )


def tiny_text_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text, vision, ids = tiny.qwen_vl(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}
    config = Qwen3VLConfig(
        text_config={**text, "head_dim": 16, "rope_parameters": rope},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **ids,
    )
    return Qwen3VLForConditionalGeneration(config)
