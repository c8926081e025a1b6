"""A tiny random Qwen2.5-VL written to a folder, from which a server loads it like published weights."""

import json
from pathlib import Path
from typing import Any

import torch

HEAD = 32
"""Width of an attention head: the smallest that vllm's kernels take."""
SIDE = 56
"""Images of this side are seen as they are, as 2 × 2 tokens; larger ones are made smaller."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, as Qwen-VL has it."""
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": SIDE * SIDE,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def tiny_vlm() -> tuple[Any, Any]:
    """The tokenizer and the model, in float32."""
    # Not at the head of the file: whoever collects tests without this lane would wait for it.
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from async_flowrl.policies.qwen_image import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in NAMES}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 2 * HEAD,
            "intermediate_size": 2 * HEAD,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["endoftext"],
            "eos_token_id": ids["im_end"],
            "pad_token_id": ids["endoftext"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 2 * HEAD,
            "intermediate_size": 2 * HEAD,
            "num_heads": 2,
            "out_hidden_size": 2 * HEAD,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.visual.merger.mlp[-1].weight.mul_(50)  # what it sees outweighs what it reads
    return tokenizer, model


NAMES = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")


def write(folder: Path) -> Path:
    """Writes the model's folder, and returns it."""
    tokenizer, model = tiny_vlm()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.save_pretrained(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = dict(IMAGES)
        if name.startswith("video"):
            settings |= {"video_processor_type": "Qwen2VLVideoProcessor"}
            del settings["image_processor_type"]
        (folder / name).write_text(json.dumps(settings))
    return folder
