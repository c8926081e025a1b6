"""Rules for the reward server: addresses to listen at, and the access token."""

import ipaddress
import os
from pathlib import Path

LOOPBACK = "127.0.0.1"


class ServeError(ValueError):
    """Raised if a server cannot start; the message is one sentence."""


def read_token(variable: str | None, file: Path | None) -> str | None:
    """Returns the token from an environment variable or a file; None if neither is named.

    Raises ServeError if both are named, or if the token is missing or empty.
    """
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
    """Returns True if only this machine can reach the address; any host name except localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
