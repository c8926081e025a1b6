"""Single files of Hugging Face hub models, and whether the hub answers."""

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_download

CONNECT_SECONDS = 5.0
"""Time-out of the check whether the hub answers."""


def hub_file(path: str, name: str, revision: str | None) -> Path:
    """Returns the local path of one file of a hub model, downloading it if necessary.

    If the hub does not answer, only the local cache is used; huggingface_hub itself would retry for half a minute.
    Errors of huggingface_hub are passed on.
    """
    return Path(hf_hub_download(path, name, revision=revision, local_files_only=not hub_answers()))


def hub_answers() -> bool:
    """Returns True if the hub, or the configured proxy to it, accepts a connection within CONNECT_SECONDS."""
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
