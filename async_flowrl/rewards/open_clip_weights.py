"""Conversion of CLIP weights of OpenAI and open_clip to the names of transformers' CLIPModel."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
"""Matrices that transformers stores transposed, as weights of linear layers."""
LEFT_OUT = ("attn_mask", "input_resolution", "context_length", "vocab_size")
"""Checkpoint entries that are not weights and are dropped."""


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
    """Yields the weights of a transformer block; one matrix of queries, keys and values is split into three."""
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
