"""Tests that Qwen-Image 2.1's processor of texts is the whole one without pictures: here is torchvision, which that
needs."""

from pathlib import Path

import pytest
import torch

from async_flowrl.policies.qwen_image_21 import text_processor, tiny_tokenizer

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content[0].text }}{% endfor %}"
TEXTS = ["<|im_start|>user\nred<|im_end|>", "<|im_start|>user\na blue house ö<|im_end|>\n"]


def test_texts_get_the_tokens_of_the_whole_processor(tmp_path: Path) -> None:
    """Read from the folder that the whole one has written, as a published model has it."""
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = tiny_tokenizer()
    whole = Qwen3VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE)
    whole.save_pretrained(tmp_path / "processor")
    texts = text_processor().from_pretrained(tmp_path, subfolder="processor")
    how = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    expected, found = (processor(text=TEXTS, **how) for processor in (whole, texts))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    system = [{"role": "system", "content": [{"type": "text", "text": "Look."}]}]
    one, other = (p.apply_chat_template(system, tokenize=True, return_dict=False) for p in (whole, texts))
    assert one == other
