"""Joining a Ray cluster that exists: what stands in the way is said at once, and in one sentence."""

import logging
import os
import socket
from typing import Any

import ray
from ray.exceptions import RayError

from separation.placement import ResourcesMissing

MODE = "RAY_AUTH_MODE"
_REACH_SECONDS = 20.0
"""How long a cluster that exists may take to accept a connection."""


def join(address: str, **options: Any) -> None:
    """Connects this process, with `ray.init`'s options. Raises ResourcesMissing where nobody answers or lets it in."""
    check_reachable(address)
    use_token_where_it_is_asked_for(address)
    try:
        ray.init(address, **options)
    except Exception as error:
        if (refusal := token_refusal(error, address)) is None:
            raise
        raise ResourcesMissing(refusal) from error


def check_reachable(address: str) -> None:
    """Raises ResourcesMissing where nothing listens at `host:port`: Ray would try for minutes, and hear no signal."""
    host, _, port = address.rpartition(":")
    if "/" in address or not (host and port.isdigit()):
        return  # "auto", or ray://…: Ray knows what is meant
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ResourcesMissing(
            f"no Ray cluster answers at the address {address} ({error}): start one with `ray start --head` and take "
            "the address that it prints, or leave the address out for a cluster of this machine"
        ) from error


def use_token_where_it_is_asked_for(address: str) -> None:
    """Before a cluster is joined: its head may ask for the token of `~/.ray/auth_token`, which `ray.init` sends only
    where RAY_AUTH_MODE says so. A head that asks for none ends the workers of a process that sends one.

    So the head is asked without a token first. In a version of Ray that has no tokens nothing is done.
    """
    if MODE in os.environ or address.startswith("ray://"):
        return
    try:
        from ray._private import services
        from ray._private.authentication import authentication_token_setup as setup
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.exceptions import AuthenticationError
    except ImportError:
        return
    try:
        if (head := services.canonicalize_bootstrap_address(address)) is not None:
            GcsClient(address=head).internal_kv_keys(b"nothing", namespace=None)
    except AuthenticationError:
        logging.getLogger(setup.__name__).setLevel(logging.ERROR)
        # Ray 2.60's name; a version between the two has tokens, but none that it finds by itself.
        getattr(setup, "maybe_enable_token_auth_if_token_available", lambda: False)()
    except (RayError, ConnectionError):
        return  # `ray.init` meets the same, and its failure is told


def token_refusal(error: Exception, address: str) -> str | None:
    """What to do about a cluster that wanted another token; None where that was not the trouble."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if not any("InvalidAuthToken" in str(one) or type(one).__name__ == "AuthenticationError" for one in causes):
        return None
    return (
        f"the Ray cluster at {address} asks for its token, and this process has none or another one: every node needs "
        "the file ~/.ray/auth_token of its head node (`ray get-auth-token --generate` makes one) and "
        f"`export {MODE}=token` before `ray start` and before the run; {MODE}=disabled on all of them does without"
    )
