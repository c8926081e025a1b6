"""Rules for the servers of this project: the addresses they may listen on, and the token that other machines need."""

import ipaddress
import os
from pathlib import Path

LOOPBACK = "127.0.0.1"


class ServeError(ValueError):
    """A server cannot start; one sentence."""


def read_token(variable: str | None, file: Path | None) -> str | None:
    """Raises ServeError where the token that is named is not there, or empty."""
    if variable is not None and file is not None:
        raise ServeError("--token-env and --token-file exclude each other")
    if variable is not None:
        token = os.environ.get(variable, "").strip()
        if not token:
            raise ServeError(f"--token-env {variable}: there is no such environment variable, or it is empty")
        return token
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ServeError(f"--token-file {file} cannot be read: {error.strerror}") from error
    if not token:
        raise ServeError(f"--token-file {file} is empty")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
