"""The request to a judge, a chat completion: the filled template, the images as PNG, and the required answer format."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.rewards.http_contract import encode_image
from async_flowrl.types import ByteArray, Prompt

SCORE, TRANSCRIBE, PROBABILITIES = "score", "transcribe", "probabilities"
TEMPLATES = {
    SCORE: "The image was made for this prompt:\n{prompt}\n\nHow well does it show what the prompt asks for? "
    'Answer with JSON only, {"score": NUMBER}, from {min} (not at all) to {max} (perfectly).',
    TRANSCRIBE: "Write down all the text that this image shows, and nothing else.",
    PROBABILITIES: "The image was made for this prompt:\n{prompt}\n\nDoes it show what the prompt asks for? "
    "Answer with one of: {answers}.",
}
"""Mode → default question; the names in braces are replaced (PLACEHOLDERS)."""
GROUP_TEMPLATE = (
    "These {count} images were made for one prompt:\n{prompt}\n\nHow well does each show what the prompt asks for? "
    'Answer with JSON only, {"scores": [NUMBER, ...]}, one number per image in their order, from {min} (not at all) to '
    "{max} (perfectly)."
)
MAX_TOKENS = {SCORE: 256, TRANSCRIBE: 512, PROBABILITIES: 4}
"""Mode → default limit of the tokens of an answer."""
PLACEHOLDERS = ("prompt", "target", "min", "max", "answers", "count")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Question:
    """Everything of a request except its images and its prompt.

    `extra_body` replaces fields of the request body; the value None removes a field.
    """

    model: str
    template: str
    system: str | None
    mode: str
    bounds: tuple[float, float]
    answers: tuple[str, ...]
    group: bool
    structured: bool
    temperature: float
    seed: int | None
    max_tokens: int
    top_logprobs: int
    extra_body: Mapping[str, Any]

    def body(self, prompt: Prompt, urls: Sequence[str]) -> dict[str, Any]:
        """Returns the body of a chat completion request; `urls` are the URLs of its images."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        asked = {"type": "text", "text": self._filled(prompt, len(urls))}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": [*images, asked]}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        if self.mode == PROBABILITIES:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.mode == SCORE and self.structured:
            body["response_format"] = self._format(len(urls))
        return {name: value for name, value in (body | dict(self.extra_body)).items() if value is not None}

    def key(self, prompt: Prompt, digests: Sequence[str], version: str) -> bytes:
        """Returns a 32-byte hash that is equal for the same question about the same images."""
        asked = json.dumps([version, self.body(prompt, digests)], sort_keys=True)
        return hashlib.sha256(asked.encode()).digest()

    def _filled(self, prompt: Prompt, count: int) -> str:
        """Fills in the template in one pass, so braces in a prompt are not replaced."""
        values = {
            "prompt": prompt.text,
            "target": prompt.target or "",
            "min": f"{self.bounds[0]:g}",
            "max": f"{self.bounds[1]:g}",
            "answers": ", ".join(self.answers),
            "count": str(count),
        }
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.template)

    def _format(self, count: int) -> dict[str, Any]:
        number = {"type": "number", "minimum": self.bounds[0], "maximum": self.bounds[1]}
        several = {"type": "array", "items": number, "minItems": count, "maxItems": count}
        name, what = ("scores", several) if self.group else ("score", number)
        schema = {"type": "object", "properties": {name: what}, "required": [name], "additionalProperties": False}
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def placeholders_of(template: str) -> set[str]:
    """Returns the names in single braces. Raises ValueError for a name that is not in PLACEHOLDERS."""
    names = set(_PLACEHOLDER.findall(template))
    for name in sorted(names - set(PLACEHOLDERS)):
        raise ValueError(unknown_name("a name in braces in prompt_template", name, PLACEHOLDERS))
    return names


def digest_of(image: ByteArray) -> str:
    """Returns the SHA-256 of the shape and the pixels of an image uint8 [H, W, 3]."""
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()


def png_url(image: ByteArray) -> str:
    """Returns an image uint8 [H, W, 3] as a data URI; PNG is lossless."""
    return "data:image/png;base64," + base64.b64encode(encode_image(image, "png")).decode()
