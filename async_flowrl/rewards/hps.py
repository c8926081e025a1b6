"""The rewards `hpsv2` and `hpsv2.1`: how well people would like an image for its prompt, by a CLIP model.

The model is a CLIP ViT-H/14 trained on people's choices between two images. Its weights have open_clip's names, and are
renamed for transformers' CLIPModel.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from async_flowrl.rewards.clip import Clip, normalised, resized
from async_flowrl.rewards.model_weights import check_path, check_pins, loading, read_weights, weights_file
from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class HPSv2(Clip):
    """cos(image, text) / `scale` (Wu et al. 2023, "Human Preference Score v2"), about 0.2 to 0.35 for `scale=1`.

    `checkpoint` is a local file or folder, or a hub repository; only tensors are read from it. `model` is the
    transformers version of the open_clip model that HPSv2 started from, for architecture, tokenizer and image size.
    Images are scaled as tensors, as the package hpsv2 does it: `antialias=True` as with torchvision 0.17 and later,
    False as with older ones.
    """

    checkpoint: str = "xswu/HPSv2"
    model: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    model_revision: str | None = None
    scale: float = 1.0
    antialias: bool = True
    name: ClassVar[str] = "HPSv2"
    file: ClassVar[str] = "HPS_v2_compressed.pt"

    def __post_init__(self) -> None:
        super().__post_init__()
        pins = {"revision": (self.checkpoint, self.revision), "model_revision": (self.model, self.model_revision)}
        check_pins(self.name, **pins)

    def check(self, prompt: Prompt) -> None:
        check_path(self.name, "checkpoint", self.checkpoint)
        super().check(prompt)

    def _preparation(self) -> tuple[str, str | None]:
        return self.model, self.model_revision

    def _pixels(self, images: Any, size: int) -> "torch.Tensor":
        return prepared(images, size, antialias=self.antialias)

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return [cosine / self.scale for cosine in self.cosines(images, clean(prompt.text))]

    def of_tensor(self, images: "torch.Tensor", prompt: Prompt) -> "torch.Tensor":
        return self.tensor_cosines(images, clean(prompt.text)) / self.scale

    @staticmethod
    def prepared_tensor(images: "torch.Tensor", size: int) -> "torch.Tensor":
        """Scales the longer side to `size`, pads with 0 and normalises; antialiased."""
        return fitted(images, size, resized)

    def _network(self) -> Any:
        from transformers import CLIPConfig, CLIPModel

        from async_flowrl.seeds import untouched_rng

        with loading(self.name, self.checkpoint):
            state = to_transformers(read_weights(weights_file(self.checkpoint, self.file, self.revision)))
            with untouched_rng():  # the constructor draws random weights, which are replaced below
                model = CLIPModel(CLIPConfig.from_pretrained(self.model, revision=self.model_revision))
        model.load_state_dict(state)
        return model.float()


@dataclass(eq=False)
class HPSv21(HPSv2):
    """HPSv2.1: the same architecture, trained on more and better choices."""

    name: ClassVar[str] = "HPSv2.1"
    file: ClassVar[str] = "HPS_v2.1_compressed.pt"


def clean(text: str) -> str:
    """Returns a prompt as open_clip's tokenizer cleans it: repaired, HTML decoded twice, white space collapsed."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


def prepared(images: ByteArray, size: int, *, antialias: bool) -> "torch.Tensor":
    """Scales the longer side of images uint8 [b, H, W, 3] to `size` (bicubic), pads with 0, normalises: float32."""
    import torch
    from torch.nn import functional

    def resize(pixels: torch.Tensor, *sides: int) -> torch.Tensor:
        return functional.interpolate(pixels, sides, mode="bicubic", align_corners=False, antialias=antialias)

    return fitted(torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255, size, resize)


def fitted(pixels: "torch.Tensor", size: int, resize: Callable[..., "torch.Tensor"]) -> "torch.Tensor":
    """Scales the longer side of pixels [n, 3, H, W] to `size` by `resize(pixels, H, W)`, pads with 0, normalises."""
    from torch.nn import functional

    scale = size / max(pixels.shape[2:])
    if scale != 1:
        small = [round(side * scale) for side in pixels.shape[2:]]  # side * size / longer would round differently
        pixels = resize(pixels, *small)
        below, right = size - small[0], size - small[1]
        pixels = functional.pad(pixels, (right // 2, right - right // 2, below // 2, below - below // 2))
    return normalised(pixels)


TOWERS = {"transformer.resblocks.": "text_model", "visual.transformer.resblocks.": "vision_model"}
IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OUTSIDE = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
# Matrices that transformers stores transposed, as weights of linear layers.
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
LEFT_OUT = ("attn_mask", "input_resolution", "context_length", "vocab_size")


def to_transformers(state: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Returns a state dict for CLIPModel. Raises ValueError for a name that is not a weight of these models."""
    return {name: tensor for key, value in state.items() if key not in LEFT_OUT for name, tensor in _named(key, value)}


def _named(key: str, value: "torch.Tensor") -> Iterator[tuple[str, "torch.Tensor"]]:
    if key in OUTSIDE:
        yield OUTSIDE[key], value
    elif key in TRANSPOSED:
        yield TRANSPOSED[key], value.T.contiguous()
    else:
        yield from _in_block(key, value)


def _in_block(key: str, value: "torch.Tensor") -> Iterator[tuple[str, "torch.Tensor"]]:
    for start, tower in TOWERS.items():
        if key.startswith(start):
            number, _, name = key.removeprefix(start).partition(".")
            layer = f"{tower}.encoder.layers.{number}"
            if name.startswith("attn.in_proj_"):
                for letter, part in zip("qkv", value.chunk(3), strict=True):
                    yield f"{layer}.self_attn.{letter}_proj.{name.removeprefix('attn.in_proj_')}", part
                return
            module, _, kind = name.rpartition(".")
            if module in IN_BLOCK:
                yield f"{layer}.{IN_BLOCK[module]}.{kind}", value
                return
    raise ValueError(f"{key!r} is no weight of a CLIP model by OpenAI or open_clip")
