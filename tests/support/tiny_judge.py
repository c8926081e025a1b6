"""The probabilities that a tiny Qwen2.5-VL itself gives to tokens, beside which tests lay those of a server."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil


@torch.no_grad()
def first_log_probs(
    tokenizer: Any, model: Any, parts: Sequence[Mapping[str, Any]], bias: Mapping[int, float]
) -> torch.Tensor:
    """Returns the natural log-probabilities [vocabulary] of the first token of the answer to a user's message.

    `parts` are the message's, images and texts. `bias` is token id → number that is added to the token's logit.
    """
    text, pictures = "<|im_start|>user\n", []
    for part in parts:
        if part["type"] == "text":
            text += part["text"]
            continue
        content = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
        pictures.append(Image.open(io.BytesIO(content)).convert("RGB"))
        text += "<|vision_start|>\0<|vision_end|>"
    text += "<|im_end|>\n<|im_start|>assistant\n"
    seen = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)(images=pictures, return_tensors="pt")
    for grid in seen["image_grid_thw"]:
        text = text.replace("\0", "<|image_pad|>" * (int(grid.prod()) // 4), 1)
    ids = tokenizer(text, return_tensors="pt").input_ids
    logits = model(input_ids=ids, use_cache=False, **seen).logits[0, -1].double()
    for token, value in bias.items():
        logits[token] += value
    return torch.log_softmax(logits, -1)
