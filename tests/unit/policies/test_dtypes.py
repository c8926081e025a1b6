"""Tests of `model.dtype=auto`, which reads the headers of the transformer's files, in a folder and on the hub."""

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.memory.rehearsal.model import architecture
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.tiny import build_tiny

FILE = "diffusion_pytorch_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model_of(folder: Path, dtype: torch.dtype, *, kept: str = "", shards: int = 1) -> Path:
    """A tiny model cast to `dtype`, but for the names that begin with `kept`; its files and their index."""
    model = Path(shutil.copytree(build_tiny(TinyConfig()), folder / "model"))
    weights = load_file(model / "transformer" / FILE)
    cast = {n: t if kept and n.startswith(kept) else t.to(dtype) for n, t in weights.items()}
    if shards == 1:
        save_file(cast, model / "transformer" / FILE)
        return model
    (model / "transformer" / FILE).unlink()
    files = {name: f"part-{place % shards}.safetensors" for place, name in enumerate(sorted(cast))}
    for file in set(files.values()):
        save_file({name: cast[name] for name in cast if files[name] == file}, model / "transformer" / file)
    (model / "transformer" / f"{FILE}.index.json").write_text(json.dumps({"weight_map": files}))
    return model


@pytest.mark.parametrize("shards", [1, 3])
def test_most_bytes_decide(tmp_path: Path, shards: int) -> None:
    """Norms are often kept in float32."""
    model = model_of(tmp_path, torch.bfloat16, kept="norm_out", shards=shards)
    assert resolve_model(ModelConfig(path=str(model))).dtype == "bfloat16"


def test_published_models_are_planned_in_what_their_files_hold() -> None:
    from async_flowrl.config.schema import Config

    config = Config()
    for path, dtype in (("Qwen/Qwen-Image", "bfloat16"), ("Tongyi-MAI/Z-Image-Turbo", "float32")):
        config.model.path = path
        assert architecture(config)[1] == dtype
    config.model.dtype = "bfloat16"
    assert architecture(config)[1] == "bfloat16"


class Hub(SimpleHTTPRequestHandler):
    """Files under /Someone/Their-Image/resolve/COMMIT/, in parts where a range is asked for; nothing else."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"{self.path.rpartition('/')[2]} {self.headers.get('range', '')}".strip())
        file = Path(self.directory) / self.path.partition(f"/resolve/{COMMIT}/")[2]
        if not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        first, _, last = self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        data = file.read_bytes()[int(first) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.asked = []
    model = model_of(tmp_path, torch.bfloat16)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(model)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
