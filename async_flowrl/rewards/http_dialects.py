"""The dialects of reward servers (formats of requests and replies): ours, flow_grpo's and Flow-Factory's.

The reward `http` writes requests and reads replies; `serve-rewards` reads requests by the functions at the end.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards import http_pickle
from async_flowrl.rewards.http_contract import PATH, ContractError, ScoreReply, prompt_fields, read_scores
from async_flowrl.types import Prompt

Encode = Callable[[Sequence[bytes], Prompt], bytes]
"""(files, prompt) → request body; the files are encoded images."""
Read = Callable[[bytes, int], ScoreReply]
"""(reply body, number of images) → scores; raises ContractError for a wrong reply."""


@dataclass(frozen=True)
class Dialect:
    """A request format for the images of one prompt, and the format of its reply."""

    path: str
    """Path of the server, used if its URL has none."""
    content_type: str
    kind: str
    """Image format (png or jpeg) if the options name none."""
    encode: Encode
    read: Read


def flow_grpo_body(images: Sequence[bytes], prompt: Prompt) -> bytes:
    """Returns a pickle for flow_grpo's servers (GenEval, UnifiedReward, DeQA) and for verl-omni's HTTP scorer."""
    metadata = dict(prompt.metadata)
    values = {
        "images": list(images),
        "prompts": [prompt.text] * len(images),
        "metadata": metadata,
        "meta_datas": [metadata] * len(images),
        "only_strict": True,
    }
    return http_pickle.dumps(values)


def flow_grpo_reply(body: bytes, count: int) -> ScoreReply:
    """Reads `scores`, or `outputs` as UnifiedReward and DeQA name it; GenEval's lists per image become extras.

    Raises ContractError.
    """
    try:
        fields = http_pickle.loads(body)
    except http_pickle.PickleRefused as error:
        raise ContractError(f"the reply: {error}") from error
    if not isinstance(fields, dict):
        raise ContractError(f"the reply must be a pickled dict, got {type(fields).__name__}")
    if "error" in fields:
        raise ContractError(f"the server says: {str(fields['error'])[: contract.SHOWN_CHARACTERS]!r}")
    scores = read_scores(fields.get("scores", fields.get("outputs")), count)
    names = [name for name in ("rewards", "strict_rewards") if _numbers(fields.get(name), count)]
    extras = [{name: float(fields[name][image]) for name in names} for image in range(count)]
    return ScoreReply(scores, tuple(extras) if names else ())


def _numbers(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(isinstance(value, bool) or contract.is_number(value) for value in values)


def flow_factory_body(images: Sequence[bytes], prompt: Prompt) -> bytes:
    """Returns JSON as Flow-Factory's example server reads it: lists of prompts and of base64 images."""
    encoded = [base64.b64encode(image).decode() for image in images]
    absent = dict.fromkeys(("video", "condition_images", "condition_videos"))
    return contract.dumps({"prompt": [prompt.text] * len(images), "image": encoded, **absent})


def flow_factory_reply(body: bytes, count: int) -> ScoreReply:
    """Reads `rewards`. Raises ContractError if the reply is wrong or has an `error`."""
    fields = contract.loads(body, "the reply")
    if fields.get("error"):
        raise ContractError(f"the server says: {str(fields['error'])[: contract.SHOWN_CHARACTERS]!r}")
    return ScoreReply(read_scores(fields.get("rewards"), count))


def _own_body(images: Sequence[bytes], prompt: Prompt) -> bytes:
    return contract.request_body(images, [prompt_fields(prompt)])


DIALECTS: Mapping[str, Dialect] = {
    "async_flowrl": Dialect(PATH, "application/json", "png", _own_body, contract.read_reply),
    "flow_grpo": Dialect("/", "application/octet-stream", "jpeg", flow_grpo_body, flow_grpo_reply),
    "flow_factory": Dialect("/compute", "application/json", "png", flow_factory_body, flow_factory_reply),
}


def flow_grpo_request(body: bytes, limits: contract.Limits) -> contract.ScoreRequest:
    """Reads the request of a flow_grpo trainer. Raises ContractError."""
    try:
        fields = http_pickle.loads(body)
    except http_pickle.PickleRefused as error:
        raise ContractError(str(error)) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("images"), list):
        raise ContractError("the pickle must be a dict with images, a list of files as bytes")
    metadata = fields.get("meta_datas", fields.get("metadata"))
    return _request(fields["images"], fields.get("prompts"), metadata, limits)


def flow_factory_request(fields: Mapping[str, Any], limits: contract.Limits) -> contract.ScoreRequest:
    """Reads the request of a Flow-Factory trainer. Raises ContractError."""
    images = fields.get("image")
    if not isinstance(images, list) or any(fields.get(name) for name in ("video", "condition_videos")):
        raise ContractError("image must be a list of base64 PNG or JPEG files; videos are not scored")
    prompts = fields.get("prompt")
    own = {"version": contract.VERSION, "images": images, "prompts": prompts}
    return contract.read_request(own, None, limits)


def _request(images: list[Any], prompts: object, metadata: object, limits: contract.Limits) -> contract.ScoreRequest:
    """Checks flow_grpo's lists. GenEval's clients send no prompts; these are then read from the metadata."""
    if not images or len(images) > limits.images or not all(isinstance(image, bytes) for image in images):
        raise ContractError(f"images must be a list of 1 to {limits.images} PNG or JPEG files as bytes")
    count = len(images)
    rows = metadata if isinstance(metadata, list) else [metadata or {}] * count
    if len(rows) != count or not all(isinstance(row, dict) for row in rows):
        raise ContractError(f"meta_datas must be a list of {count} dicts")
    texts = [row.get("prompt") for row in rows if isinstance(row, dict)] if prompts is None else prompts
    if not isinstance(texts, list) or len(texts) != count:
        raise ContractError(f"prompts must be a list of {count} texts")
    entries = [{"text": text, "metadata": row} for text, row in zip(texts, rows, strict=True)]
    return contract.ScoreRequest(images, [contract.read_prompt(index, entry) for index, entry in enumerate(entries)])
