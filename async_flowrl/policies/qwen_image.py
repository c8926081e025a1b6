"""The model family Qwen-Image: latents are [tokens, 64], and guidance rescales each token to its norm without it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import qwen_text, tiny
from async_flowrl.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, on_host, with_norm_of
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.stored import configuration
from async_flowrl.types import Conditioning, EncoderInput, Prompt, Sampling, TokenIds

# Default of QwenImagePipeline.__call__ for `max_sequence_length`; that of its `encode_prompt` alone is 1024.
_TEXT_TOKENS = 512
# Positions in each direction that diffusers' QwenEmbedRope has a table of.
_POSITIONS = 4096
_MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
_VISION = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
_TINY_SPECIAL = ("endoftext", "im_start", "im_end", *_VISION)


class QwenImagePolicy(PipelinePolicy):
    family = "qwen_image"
    title = "Qwen-Image"
    lora_targets: Sequence[str] = (*JOINT_ATTENTION, *_MLP)
    # With one step, stretching the schedule to its terminal value would divide by zero.
    least_steps = 2
    vae_stages = "temperal_downsample"
    most_tokens = 1024
    packs_tokens = names_patch_size = has_system_prompt = True

    def __init__(
        self, transformer: nn.Module, scheduler: Any, *, max_sequence_length: int | None = None, **options: Any
    ) -> None:
        super().__init__(transformer, scheduler, max_sequence_length=max_sequence_length or _TEXT_TOKENS, **options)
        qwen_text.skip_unused_lengths()
        if self._config.guidance_embeds:
            raise ValueError("Qwen-Image with embedded guidance (guidance_embeds=true) is not supported by diffusers")

    @property
    def lora_exclude(self) -> str:
        """The text layers of the last block, because the network drops that block's text output."""
        return rf"transformer_blocks\.{self._config.num_layers - 1}\.(attn\.to_add_out|attn\.add_q_proj|txt_mlp\..*)"

    @property
    def largest_grid(self) -> tuple[int, int]:
        """Image tokens have positions on both sides of 0, and text those that follow the largest of them."""
        most = 2 * (_POSITIONS - self._text_tokens(_TEXT_TOKENS))
        return most, most

    @torch.no_grad()
    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Returns {"prompt_embeds": [L, D] float32} per text of L tokens, without padding.

        Token ids are those of the whole prompt template. If they contain another system prompt than the usual one, it
        must also be given as `system`.
        """
        with qwen_text.system_prompt(self.whole("encode prompts"), system):
            return super().encode(texts, negative=negative)

    def _encode_one(self, text: str) -> Conditioning:
        embeds, mask = self._stock_encode(text)
        if mask is not None:
            embeds = embeds[:, mask[0].bool()]
        return on_host(prompt_embeds=embeds)

    def _encode_ids(self, ids: TokenIds) -> Conditioning:
        pipeline = self.whole("encode prompts")
        embeds = qwen_text.encode_ids(pipeline, ids)[: self._text_tokens(_TEXT_TOKENS)]
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        tokens = min(self.planned_tokens, self._text_tokens(_TEXT_TOKENS))
        return {"prompt_embeds": (tokens, self._config.joint_attention_dim)}

    def _guide(self, conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
        return with_norm_of(conditional, super()._guide(conditional, unconditional, scale))

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        embeds, mask = qwen_text.padded_texts(branches, len(latents) // len(branches), self._dtype)
        return self._called(
            hidden_states=latents.to(self._dtype),
            timestep=self._time(sigma),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *self._grid(sampling.resolution))]] * len(latents),
        )

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        unpacked = pipeline._unpack_latents(latents, *height_width(resolution), pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = self._statistics(vae.config, unpacked)
        # The pipeline divides by the reciprocal, too; a product would give other bits.
        decoded = vae.decode(unpacked / (1.0 / std) + mean, return_dict=False)[0]
        return cast("Tensor", decoded[:, :, 0])


class QwenImageFamily(PipelineFamily):
    policy = QwenImagePolicy
    pipeline, transformer = "QwenImagePipeline", "QwenImageTransformer2DModel"
    # The defaults of QwenImagePipeline.__call__, diffusers 0.40.
    usual_guidance = 4.0, 0.0
    usual_steps = 50

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        """The prompt stands in a template, whose beginning is left out of the limit."""
        bare = qwen_text.bare_pipeline(tokenizer)
        template = bare.prompt_template_encode
        return template.format(text), template.index("{}"), bare.prompt_template_encode_start_idx + limit

    def check_token_ids(self, prompts: Sequence[Prompt], path: str, *, revision: str | None) -> None:
        from transformers import Qwen2Tokenizer

        bare = qwen_text.bare_pipeline(Qwen2Tokenizer.from_pretrained(path, subfolder="tokenizer", revision=revision))
        encoder = configuration(path, "text_encoder", revision)
        qwen_text.check_ids(bare, prompts, int(encoder.get("text_config", encoder)["vocab_size"]))


def tiny_pipeline(config: TinyConfig) -> Any:
    import diffusers

    tokenizer = tiny_tokenizer()
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        **tiny.blocks(config),
        joint_attention_dim=tiny.TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.QwenImagePipeline(
        scheduler=tiny.qwen_image_scheduler(),
        vae=tiny.contrasted(vae, config.contrast),
        text_encoder=tiny_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


def tiny_tokenizer(bare: Any = None) -> Any:
    """Returns a byte-level BPE tokenizer with merges learned from the prompt template of the pipeline `bare`."""
    # The pipeline drops the first `prompt_template_encode_start_idx` tokens, so the template before the prompt must
    # have exactly that many tokens.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bare = bare or qwen_text.bare_pipeline(None)
    template, drop = bare.prompt_template_encode, bare.prompt_template_encode_start_idx
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    special = [f"<|{name}|>" for name in _TINY_SPECIAL]
    parts = re.split("|".join(map(re.escape, special)), template)
    bpe.train_from_iterator([part.replace("{}", "") for part in parts], trainer=trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary = {**learned["vocab"], **{name: len(learned["vocab"]) + i for i, name in enumerate(special)}}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=special,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    length = len(tokenizer(template.split("{}")[0]).input_ids)
    if length != drop:
        raise RuntimeError(f"the tiny tokenizer makes {length} tokens of the template, the pipeline drops {drop}")
    return tokenizer


def tiny_text_encoder(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text, vision, ids = tiny.qwen_vl(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "max_position_embeddings": 2048, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [0]},
        **ids,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
