"""Reward server that keeps our contract and asks a server of flow_grpo, verl-omni or Flow-Factory for the scores.

    python adapter.py --port 8001 --protocol flow_grpo --url http://127.0.0.1:18085

flow_grpo's servers (GenEval, UnifiedReward, DeQA) and verl-omni's HTTP scorer exchange pickles. Unpickling in general
runs whatever code a pickle names; here a reply may hold lists, dicts, texts, numbers and numpy arrays of them alone.
"""

import argparse
import base64
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from async_flowrl.cli import reward_server as server
from async_flowrl.rewards.http_contract import encode_image
from async_flowrl.types import ByteArray, Prompt

MAX_REPLY_BYTES = 16 * 2**20
CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((core, name) for core in CORES for name in ("_reconstruct", "scalar")),
}
"""(module, name) that a pickle may refer to: what numpy writes, all of it in C, so that no pickle can change it."""


class Plain(pickle.Unpickler):
    """Unpickler that looks up no other name than those of ALLOWED."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the pickle asks for {module[:60]}.{name[:60]}, which is refused")
        return super().find_class(module, name)


def unpickled(body: bytes) -> dict[str, Any]:
    """Returns the dict of a pickled reply. Raises ValueError, one sentence, for any other pickle."""
    try:
        fields = Plain(io.BytesIO(body)).load()
    except Exception as error:  # a damaged pickle may raise whatever it likes
        raise ValueError(f"its reply is no pickle of numbers, texts and arrays: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"its reply must be a pickled dict, got {type(fields).__name__}")
    return fields


def flow_grpo(url: str, client: httpx.Client) -> Callable[[ByteArray, Prompt], list[dict[str, float]]]:
    """Returns a reward that asks a server of pickles. GenEval's `rewards` and `strict_rewards` become extras."""

    def score(images: ByteArray, prompt: Prompt) -> list[dict[str, float]]:
        count, row = len(images), {**prompt.metadata, "prompt": prompt.text}
        asked = {
            "images": [encode_image(image, "jpeg") for image in images],
            "prompts": [prompt.text] * count,
            "metadata": row,
            "meta_datas": [row] * count,
            "only_strict": True,
        }
        fields = unpickled(reply(client, url, content=pickle.dumps(asked, protocol=4)))
        columns = {"score": numbers(fields, count, "scores", "outputs")}
        columns |= {name: numbers(fields, count, name) for name in ("rewards", "strict_rewards") if name in fields}
        return [{name: column[index] for name, column in columns.items()} for index in range(count)]

    return score


def flow_factory(url: str, client: httpx.Client) -> Callable[[ByteArray, Prompt], list[float]]:
    """Returns a reward that asks a server of JSON as Flow-Factory's example has it."""

    def score(images: ByteArray, prompt: Prompt) -> list[float]:
        encoded = [base64.b64encode(encode_image(image, "png")).decode() for image in images]
        absent = dict.fromkeys(("video", "condition_images", "condition_videos"))
        response = httpx.Response(
            200, content=reply(client, url, json={"prompt": [prompt.text] * len(images), "image": encoded, **absent})
        )
        return numbers(response.json(), len(images), "rewards")

    return score


PROTOCOLS = {"flow_grpo": flow_grpo, "flow_factory": flow_factory}


def reply(client: httpx.Client, url: str, **content: Any) -> bytes:
    """Posts the content and returns the reply. Raises ValueError, which names the server."""
    try:
        with client.stream("POST", url, **content) as response:
            body = bytearray()
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise ValueError(f"{url} answered with more than {MAX_REPLY_BYTES} bytes")
    except httpx.HTTPError as error:
        raise ValueError(f"{url} does not answer: {type(error).__name__} {error}") from error
    if not response.is_success:  # flow_grpo's servers answer with a traceback
        last = body.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"{url} answered {response.status_code}: {last[:200]}")
    return bytes(body)


def numbers(fields: dict[str, Any], count: int, *names: str) -> list[float]:
    """Returns the first field of these names. Raises ValueError unless it is `count` finite numbers."""
    if fields.get("error"):
        raise ValueError(f"the server says: {str(fields['error'])[:200]!r}")
    given = next((fields[name] for name in names if fields.get(name) is not None), None)
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its {names[0]} are no numbers: {str(given)[:200]}") from error
    if values.shape != (count,) or not np.isfinite(values).all():
        raise ValueError(f"its {names[0]} must be {count} finite numbers, got {str(given)[:200]}")
    return [float(value) for value in values]


def main() -> int:
    parser = argparse.ArgumentParser(description="Serves the scores of another project's reward server.")
    parser.add_argument("--protocol", choices=list(PROTOCOLS), required=True)
    parser.add_argument("--url", required=True, help="of the other server, e.g. http://127.0.0.1:18085")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for its reply (default: %(default)s)")
    server.add_arguments(parser)
    given = parser.parse_args()
    try:
        with httpx.Client(timeout=given.timeout, trust_env=False) as client:
            return server.serve(PROTOCOLS[given.protocol](given.url, client), given, given.url)
    except server.ServeError as error:
        sys.stderr.write(f"adapter: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
