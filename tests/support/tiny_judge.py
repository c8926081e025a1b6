"""A tiny Qwen2.5-VL with random weights behind an OpenAI-compatible server on loopback, for tests of judge rewards.

With random weights it never writes a score that can be parsed, but it has a probability for every token.
"""

import base64
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from async_flowrl.policies.qwen_image import tiny_text_encoder, tiny_tokenizer

NAME = "tiny-vlm"
MAX_TOP_LOGPROBS = 20


@dataclass
class TinyVLM:
    """The given model, or one of its own; it answers ChatML conversations with images by greedy decoding."""

    tokenizer: Any = field(default_factory=tiny_tokenizer)
    model: Any = None
    images: Any = field(default_factory=lambda: Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.model is not None:
            return
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = tiny_text_encoder(self.tokenizer).eval()
            with torch.no_grad():
                self.model.model.visual.merger.mlp[-1].weight.mul_(50)  # the image counts more than the text

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    @torch.no_grad()
    def generate(
        self, messages: list[dict[str, Any]], max_tokens: int, bias: dict[int, float]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Returns the token ids of the answer, and for each of them the natural log-probabilities [vocabulary].

        `bias` is token id → number that is added to the token's logit.
        """
        text, pictures = self._prompt(messages)
        seen = self.images(images=pictures, return_tensors="pt") if pictures else {}
        for grid in seen.get("image_grid_thw", ()):
            text = text.replace("\0", "<|image_pad|>" * (int(grid.prod()) // 4), 1)
        ids = self.tokenizer(text, return_tensors="pt").input_ids
        answer: list[int] = []
        log_probs = []
        while len(answer) < max_tokens:
            whole = torch.cat((ids, torch.tensor([answer], dtype=ids.dtype)), dim=1)
            logits = self.model(input_ids=whole, use_cache=False, **seen).logits[0, -1].double()
            for token, value in bias.items():
                logits[token] += value
            log_probs.append(logits.log_softmax(-1))
            answer.append(int(logits.argmax()))
            if answer[-1] == self.id_of("<|im_end|>"):
                break
        return answer, log_probs

    def _prompt(self, messages: list[dict[str, Any]]) -> tuple[str, list[Image.Image]]:
        text, pictures = "", []
        for message in messages:
            parts = message["content"]
            said = ""
            for part in [{"type": "text", "text": parts}] if isinstance(parts, str) else parts:
                if part["type"] == "text":
                    said += part["text"]
                    continue
                content = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
                pictures.append(Image.open(io.BytesIO(content)).convert("RGB"))
                said += "<|vision_start|>\0<|vision_end|>"
            text += f"<|im_start|>{message['role']}\n{said}<|im_end|>\n"
        return text + "<|im_start|>assistant\n", pictures


def application(vlm: TinyVLM) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] != NAME:
            raise HTTPException(404, f"The model {body['model']} does not exist.")
        if body.get("top_logprobs", 0) > MAX_TOP_LOGPROBS:
            raise HTTPException(400, f"top_logprobs must be at most {MAX_TOP_LOGPROBS}.")
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        with vlm.lock:
            ids, log_probs = vlm.generate(body["messages"], body["max_tokens"], bias)
        ended = ids[-1] == vlm.id_of("<|im_end|>")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": vlm.tokenizer.decode(ids, skip_special_tokens=True)},
            "finish_reason": "stop" if ended else "length",
            "logprobs": _logprobs(vlm, ids, log_probs, body["top_logprobs"]) if body.get("logprobs") else None,
        }
        return {"id": "1", "object": "chat.completion", "created": 0, "model": NAME, "choices": [choice]}

    return app


def _logprobs(vlm: TinyVLM, ids: list[int], log_probs: list[torch.Tensor], top: int) -> dict[str, Any]:
    def entry(token: int, values: torch.Tensor) -> dict[str, Any]:
        return {"token": vlm.tokenizer.decode([token]), "logprob": float(values[token]), "bytes": None}

    return {
        "content": [
            {**entry(token, values), "top_logprobs": [entry(int(t), values) for t in values.topk(top).indices]}
            for token, values in zip(ids, log_probs, strict=True)
        ]
    }


@contextmanager
def tiny_judge(vlm: TinyVLM) -> Iterator[str]:
    """Yields the `base_url` of a server for the model, which runs in a thread until the block ends."""
    server = uvicorn.Server(uvicorn.Config(application(vlm), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
