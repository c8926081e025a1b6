"""Files of Hugging Face hub models: downloads of those that a process needs, into the hub's cache on this machine."""

import json
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_download, snapshot_download

CONNECT_SECONDS = 5.0
# Files that are never downloaded: weights in other formats than safetensors, and code.
_NEVER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.pb", "*.gguf", "*.py")
# Second copies of weights in another precision, e.g. model.fp16.safetensors; not downloaded either.
_VARIANTS = tuple(f"*/{name}.*.safetensors" for name in ("diffusion_pytorch_model", "model", "pytorch_model"))


def download(path: str, revision: str, parts: str) -> Path:
    """Downloads the missing files that `parts` needs (see `load_policy`) and returns the model's folder.

    If the hub does not answer, it is the folder of the local cache. Passes on errors of huggingface_hub.
    """
    how: dict[str, Any] = {"revision": revision, "local_files_only": not hub_answers()}
    index = json.loads(Path(hf_hub_download(path, "model_index.json", **how)).read_text(encoding="utf-8"))
    allowed = patterns(components(index), parts)
    return Path(snapshot_download(path, allow_patterns=allowed, ignore_patterns=[*_NEVER, *_VARIANTS], **how))


def folder_here(path: str, revision: str) -> Path:
    """Returns the folder of a downloaded hub model, without asking the hub. Raises LocalEntryNotFoundError."""
    return Path(hf_hub_download(path, "model_index.json", revision=revision, local_files_only=True)).parent


def hub_file(path: str, name: str, revision: str | None) -> Path:
    """Returns one file of a hub model, downloaded if necessary; passes on errors of the hub."""
    # If the hub does not answer, only the local cache is used; huggingface_hub itself would retry for half a minute.
    return Path(hf_hub_download(path, name, revision=revision, local_files_only=not hub_answers()))


def hub_answers() -> bool:
    """Returns True if the hub, or the configured proxy to it, accepts a connection within CONNECT_SECONDS."""
    if constants.HF_HUB_OFFLINE:
        return False
    target = urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = target.port or (443 if target.scheme == "https" else 80)
        socket.create_connection((target.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def components(index: dict[str, object]) -> list[str]:
    return [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]


def patterns(folders: Sequence[str], parts: str) -> list[str]:
    """Returns glob patterns of the files that are needed for `parts`, one of registry.PARTS."""
    structure = ["model_index.json", "scheduler/*", *(f"{folder}/*.json" for folder in folders)]
    networks = [folder for folder in folders if folder.startswith("transformer")]
    others = [folder for folder in folders if not folder.startswith(("transformer", "text_encoder", "image_encoder"))]
    whole = {"structure": [], "transformer": networks, "vae": others}.get(parts, folders)
    return [*structure, *(f"{folder}/*" for folder in whole)]
