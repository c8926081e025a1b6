"""The model family Qwen-Image-Edit (2509 and 2511): Qwen-Image, with the tokens of the edited images after the noise.

The text encoder sees each image at an area of 384 × 384 pixels, and the network the VAE's tokens of 1024 × 1024.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import qwen_text, tiny
from async_flowrl.policies.pipeline import IMAGE, estimated_tokens, on_host, squares
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.qwen_image import QwenImagePolicy, tiny_text_encoder, tiny_tokenizer
from async_flowrl.types import ConditionImage, Conditioning, Prompt, Sampling

# Tokens of the text encoder for one image: of 14 × 14 pixels, 2 × 2 of them in one, and those of "Picture 1: ".
_TEXT_TOKENS_PER_IMAGE = (392 // 28) ** 2 + 8
# More than an image of any shape has, and than are around the text in the template.
_MOST_TEXT_TOKENS_PER_IMAGE, _TEMPLATE_TOKENS = 256, 16
# What the pipeline writes before the text for each image.
_PLACE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
# Of the 4,096 positions, images take half of the larger of their rows and columns before the text, at most so many.
_MOST_TOKENS = 4096 - 512
_PROCESSOR = "processor"
IMAGE_MARK, VIDEO_MARK = "<|image_pad|>", "<|video_pad|>"


class QwenImageEditPolicy(QwenImagePolicy):
    family, title = "qwen_image_edit", "Qwen-Image-Edit"
    images = (1, math.inf)
    marks = (IMAGE_MARK, VIDEO_MARK)

    def __init__(
        self, transformer: nn.Module, scheduler: Any, *, max_sequence_length: int | None = None, **options: Any
    ) -> None:
        super().__init__(transformer, scheduler, **options)
        if max_sequence_length is not None:
            raise ValueError(f"{self.title} reads whole prompts: leave model.max_sequence_length out")

    def _encode_with_images(self, text: str, images: Sequence[Any]) -> Conditioning:
        """Returns {"prompt_embeds": [L, D], "image_0": [rows, columns, channels], …}; sizes are those of diffusers."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

        pipeline = self.whole("encode prompts")
        seen, encoded = [], {}
        for place, image in enumerate(images):
            sizes = [
                stock.calculate_dimensions(area, image.width / image.height)[::-1]
                for area in (stock.CONDITION_IMAGE_SIZE, stock.VAE_IMAGE_SIZE)
            ]
            seen.append(pipeline.image_processor.resize(image, *sizes[0]))
            encoded[IMAGE.format(place)] = self.encode_image(pipeline.image_processor.preprocess(image, *sizes[1]))
        embeds, mask = self._stock_encode(text, seen)
        _check_tokens(embeds.shape[1])
        return on_host(prompt_embeds=embeds if mask is None else embeds[:, mask[0].bool()], **encoded)

    def encode_image(self, image: Tensor) -> Tensor:
        return squares(self._encoded_image(image))

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        tokens = self.planned_tokens + _TEXT_TOKENS_PER_IMAGE * self.planned_images
        return {"prompt_embeds": (tokens, self._config.joint_attention_dim), **self.image_shapes()}

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        embeds, mask = qwen_text.padded_texts(branches, len(latents) // len(branches), self._dtype)
        images = self._edited(branches, len(latents))
        grids = [self._grid(sampling.resolution), *(tuple(image.shape[1:3]) for image in images)]
        return self._called(
            hidden_states=torch.cat([latents.to(self._dtype), *(image.flatten(1, 2) for image in images)], dim=1),
            timestep=self._time(sigma),
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *grid) for grid in grids]],
        )[:, : latents.shape[1]]


def _check_tokens(tokens: int) -> None:
    if tokens > _MOST_TOKENS:
        title = QwenImageEditPolicy.title
        raise ValueError(f"{title} has positions for {_MOST_TOKENS} tokens of text and images, got {tokens}")


def processor(kind: Any, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> Any:
    """Returns a Qwen-VL's processor of texts and images; the whole one, `kind`, needs torchvision for its videos."""
    from transformers import ProcessorMixin

    class PictureProcessor(kind):  # type: ignore[misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
        ) -> None:
            self.image_token, self.video_token = IMAGE_MARK, VIDEO_MARK
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    # A folder that a pipeline is saved to names the class of transformers.
    PictureProcessor.__name__, PictureProcessor.__module__ = kind.__name__, kind.__module__
    return PictureProcessor(image_processor, tokenizer, chat_template)


class QwenImageEditFamily(PipelineFamily):
    policy = QwenImageEditPolicy
    pipeline, transformer = "QwenImageEditPlusPipeline", "QwenImageTransformer2DModel"
    # The defaults of QwenImageEditPlusPipeline.__call__, diffusers 0.42.
    usual_guidance = 4.0, 0.0
    usual_steps = 50

    def own_parts(self, path: str | None, revision: str | None = None) -> dict[str, Any]:
        from transformers import Qwen2Tokenizer, Qwen2VLProcessor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        if path is None:
            return {}
        # Pillow's, whether or not torchvision is there: an image has the same bits on every machine.
        kinds = (Qwen2VLImageProcessorPil, Qwen2Tokenizer)
        parts = [kind.from_pretrained(path, subfolder=_PROCESSOR, revision=revision) for kind in kinds]
        return {_PROCESSOR: processor(Qwen2VLProcessor, *parts)}

    def check_length(self, prompt: Prompt, tokenizer: Any | None, side: int) -> None:
        for text in filter(None, (prompt.text, prompt.negative)):
            # A token is a byte at least.
            if len(text.encode()) + _MOST_TEXT_TOKENS_PER_IMAGE * len(prompt.images) > _MOST_TOKENS - _TEMPLATE_TOKENS:
                _check_tokens(self.tokens(text, prompt.images, tokenizer))

    def tokens(self, text: str, images: Sequence[ConditionImage], tokenizer: Any | None) -> int:
        """Returns the number of embeddings of a text and its images; without a tokenizer it is an estimate."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if tokenizer is None:
            return estimated_tokens(text) + _TEXT_TOKENS_PER_IMAGE * len(images)
        bare = stock.QwenImageEditPlusPipeline(*[None] * 6)
        places = "".join(_PLACE.format(number) for number in range(1, len(images) + 1))
        written = tokenizer(bare.prompt_template_encode.format(places + text)).input_ids
        seen = 0
        for height, width in (image.size for image in images):
            columns, rows = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
            seen += math.prod(smart_resize(rows, columns)) // 28**2 - 1  # One is in the text.
        return len(written) - int(bare.prompt_template_encode_start_idx) + seen


def tiny_pipeline(config: TinyConfig) -> Any:
    import diffusers
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tiny_tokenizer(diffusers.QwenImageEditPlusPipeline(*[None] * 6))
    transformer = diffusers.QwenImageTransformer2DModel(
        **tiny.blocks(config),
        joint_attention_dim=tiny.TEXT_DIM,
        axes_dims_rope=(4, 4, 8),
        zero_cond_t=True,
    )
    # A latent has 16 pixels per side, not 8: so an image of 1024 × 1024 has 1,024 tokens.
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=16, dim_mult=[1] * 5, num_res_blocks=0, temperal_downsample=[False] * 4
    )
    return diffusers.QwenImageEditPlusPipeline(
        scheduler=tiny.qwen_image_scheduler(),
        vae=tiny.contrasted(vae, config.contrast),
        text_encoder=tiny_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
        processor=processor(Qwen2VLProcessor, Qwen2VLImageProcessorPil(), tokenizer),
        transformer=transformer.eval(),
    )
