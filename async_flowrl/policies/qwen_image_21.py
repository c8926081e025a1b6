"""The model family Qwen-Image 2.1, text to image: one sequence of text and image, latents [tokens, 64], VAE of RGBA."""

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

# Positions that diffusers' QwenImage21Rope has tables of: text and images from 0 up, and half an image below 0.
_POSITIONS, _BELOW_ZERO = 8192, 1024
_SLOT = 4  # Latents of an image that one place of `img_mask` stands for.
_PROCESSOR = "processor"
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
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

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self.planned_tokens, self._config.context_in_dim)}

    def in_two_passes(self, device: torch.device) -> bool:
        return True  # See `_network`.

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        # The network has one layout for all rows, and a text's length decides where the image stands: texts of
        # different lengths never share a call.
        if len({len(branch["prompt_embeds"]) for branch in branches}) > 1:
            parts = zip(latents.chunk(len(branches)), sigma.chunk(len(branches)), branches, strict=True)
            return torch.cat([self._network(x, level, [branch], sampling) for x, level, branch in parts])
        texts, tokens = self._rows(branches, "prompt_embeds", len(latents)), latents.shape[1]
        places = torch.arange(texts.shape[1] + tokens // _SLOT, device=latents.device)
        return self._called(
            hidden_states=latents.to(self._dtype),
            timestep=self._time(sigma),
            encoder_hidden_states=texts,
            img_shapes=[[(1, *self._grid(sampling.resolution))]] * len(latents),
            img_mask=(places >= texts.shape[1]).expand(len(latents), -1),
        )[:, -tokens:]

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        unpacked = pipeline._unpack_latents(latents, *height_width(resolution), pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = self._statistics(vae.config, unpacked)
        return cast("Tensor", vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0])


def _forward(network: Any, *arguments: Any, **inputs: Any) -> Any:
    """Replaces diffusers' `forward` where there is text and one image: its layout is then known without looking.

    diffusers reads the layout from `img_mask` in every call, and the host waits for the device each time; a rehearsal
    has no values to read. Other calls, such as those with the stock pipeline's cache, go to diffusers.
    """
    special = ("kv_cache", "encoder_hidden_states_mask", "attention_kwargs")
    if arguments or len(inputs["img_shapes"][0]) > 1 or any(inputs.get(name) is not None for name in special):
        return type(network).forward(network, *arguments, **inputs)
    latents, text = network.img_in(inputs["hidden_states"]), network.txt_in(inputs["encoder_hidden_states"])
    joint, length, modulated = torch.cat([text, latents], dim=1), text.shape[1], None
    time = inputs["timestep"].to(latents.dtype)
    if network.config.causal_condition:  # The text is modulated by an additional row, of time 0.
        time = torch.cat([time, time.new_zeros(1)])
        modulated = torch.arange(joint.shape[1], device=joint.device) >= length
    embedded = network.time_text_embed(time, latents)
    options: dict[str, Any] = {
        "modulation": network.modulation(embedded),
        "rotary_emb": _positions(network.pos_embed, length, inputs["img_shapes"][0][0], joint.device),
        "target_token_mask": modulated,
        "segments": [(0, length, True)],
    }
    for block in network.transformer_blocks:
        joint = block(joint, **options)
    output = network.proj_out(network.norm_out(joint, embedded, modulated))
    return output if inputs.get("return_dict", True) else (output,)


def _positions(table: Any, length: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Returns QwenImage21Rope's frequencies, complex [length + tokens, D/2], of a text and an image after it."""
    table.freqs = [frequencies.to(device) for frequencies in table.freqs]
    frames, *axes = table.freqs
    _, height, width = shape
    rows, columns = (
        torch.cat([f[len(f) - (side - side // 2) :], f[: side // 2]]) for f, side in zip(axes, shape[1:], strict=True)
    )
    image = (frames[length], rows[:, None], columns[None])
    text = torch.cat([frequencies[:length] for frequencies in table.freqs], dim=-1)
    return torch.cat([text, torch.cat([f.expand(height, width, -1) for f in image], dim=-1).flatten(0, 1)])


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
        kind = text_processor()
        if path is None:
            return {_PROCESSOR: kind(tiny_tokenizer(), _TINY_TEMPLATE)}
        return {_PROCESSOR: kind.from_pretrained(path, subfolder=_PROCESSOR, revision=revision)}


def tiny_tokenizer() -> Any:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tiny.byte_tokenizer(additional_special_tokens=[*tiny.SPECIAL, *_VISION], **special)


def tiny_pipeline(config: TinyConfig) -> Any:
    import diffusers

    processor = text_processor()(tiny_tokenizer(), _TINY_TEMPLATE)
    transformer = diffusers.QwenImage21Transformer2DModel(
        num_layers=config.layers,
        attention_head_dim=16,
        num_attention_heads=config.heads,
        context_in_dim=tiny.TEXT_DIM,
        axes_dims_rope=(4, 4, 8),
    )
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, dim_mult=[1] * 5, num_res_blocks=1)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(config.contrast)
        # The gates of random blocks are nearly shut, and the image passes by them.
        transformer.modulation[1].weight.mul_(4)
        transformer.img_in.weight.mul_(0.25)
    return diffusers.QwenImage21Pipeline(
        scheduler=tiny.qwen_image_scheduler(),
        vae=vae.eval(),
        text_encoder=tiny_text_encoder(processor.tokenizer).eval(),
        processor=processor,
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
