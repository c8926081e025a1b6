"""A hub model's files, on this machine: which ones a part of the model needs, and the folder where they are."""

import json
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0
_NEVER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.pb", "*.gguf", "*.py")
"""Weights that are no safetensors, and code."""
_VARIANTS = tuple(f"*/{name}.*.safetensors" for name in ("diffusion_pytorch_model", "model", "pytorch_model"))
"""Weights in another precision beside the usual ones, e.g. model.fp16.safetensors."""


def download(path: str, revision: str, parts: str) -> Path:
    """The folder of the hub model `path` at the commit `revision`, with all that `parts` needs; see `load_policy`.

    What is not in the hub's cache on this machine is downloaded, by one process at a time; where nothing is missing,
    huggingface_hub 2 does not ask the hub at all. Raises what huggingface_hub raises, with the reason.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    index = json.loads(Path(hf_hub_download(path, "model_index.json", revision=revision)).read_text())
    allowed = patterns(components(index), parts)
    ignored = [*_NEVER, *_VARIANTS]
    return Path(snapshot_download(path, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))


def hub_file(path: str, name: str, revision: str | None) -> Path:
    """One file of a hub model; from the cache on this machine at once where nothing answers at the hub's address.

    huggingface_hub alone would try for half a minute before it says so. Raises what huggingface_hub raises.
    """
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(path, name, revision=revision, local_files_only=not hub_answers()))


def hub_answers() -> bool:
    """Whether the hub, or the proxy on the way to it, takes a connection within CONNECT_SECONDS."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    there = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else hub
    if proxy and urllib.request.proxy_bypass(hub.hostname or ""):
        there = hub
    try:
        port = there.port or (443 if there.scheme == "https" else 80)
        socket.create_connection((there.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def components(index: dict[str, object]) -> list[str]:
    """The folders of a diffusers model that model_index.json names: scheduler, tokenizer, transformer, ..."""
    return [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]


def patterns(folders: Sequence[str], parts: str) -> list[str]:
    """Files of each of `PARTS`; what one of them needs, the ones before it in PARTS need as well."""
    structure = ["model_index.json", "scheduler/*", *(f"{folder}/*.json" for folder in folders)]
    if parts == "structure":
        return structure
    if parts == "transformer":
        return [*structure, "transformer/*"]
    return [*structure, *(f"{folder}/*" for folder in folders)]
