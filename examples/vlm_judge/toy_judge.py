"""A judge without a model for the reward `vlm_judge`: it rates how much of the named colour an image has.

python examples/vlm_judge/toy_judge.py [PORT]

It is an HTTP server with the part of OpenAI's chat completions that a judge needs, so that requests, structured
answers, cache and retries can be tried without a GPU. For a real judge, start vLLM or SGLang instead.
"""

import base64
import io
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

CHANNELS = ("red", "green", "blue")


def rate(question: str, picture: bytes) -> float:
    """Returns 0 to 10: 5, plus 10 times the first named colour's mean minus the mean of the other two (values in 0..1).

    Without a named colour it rates red.
    """
    means = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=float).mean(axis=(0, 1)) / 255.0
    named = re.search("|".join(CHANNELS), question)
    channel = CHANNELS.index(named[0]) if named else 0
    return float(np.clip(5.0 + 10.0 * (means[channel] - np.delete(means, channel).mean()), 0.0, 10.0))


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = [part for message in request["messages"] for part in message["content"] if isinstance(part, dict)]
        question = " ".join(part["text"] for part in parts if part["type"] == "text")
        (url,) = (part["image_url"]["url"] for part in parts if part["type"] == "image_url")
        answer = json.dumps({"score": round(rate(question, base64.b64decode(url.partition(",")[2])), 3)})
        reply = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]
        }
        body = json.dumps({"object": "chat.completion", "model": request["model"], **reply}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing for a request."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 8000), Judge).serve_forever()
