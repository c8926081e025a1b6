"""`join` connects this process to a running Ray cluster; if that is impossible, it raises one sentence that says why.

ray_connection.py calls it.
"""

import logging
import os
import socket
from typing import Any

import ray
from ray.exceptions import RayError

from separation.placement import ResourcesMissing

MODE = "RAY_AUTH_MODE"
"""Environment variable with Ray's mode of authentication."""
_REACH_SECONDS = 20.0
"""Time-out for the connection to a running cluster."""


def join(address: str, **options: Any) -> None:
    """Connects this process to the cluster at `address`; the options are those of `ray.init`.

    Raises ResourcesMissing if nothing answers at the address or the cluster asks for another token.
    """
    check_reachable(address)
    use_token_where_it_is_asked_for(address)
    try:
        ray.init(address, **options)
    except Exception as error:
        if (refusal := token_refusal(error, address)) is None:
            raise
        raise ResourcesMissing(refusal) from error


def check_reachable(address: str) -> None:
    """Raises ResourcesMissing if nothing listens at `host:port`; Ray would try for minutes and ignore signals."""
    host, _, port = address.rpartition(":")
    if "/" in address or not (host and port.isdigit()):
        return  # "auto" or "ray://…": only Ray can resolve these.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ResourcesMissing(
            f"no Ray cluster answers at the address {address} ({error}): start one with `ray start --head` and take "
            "the address that it prints, or leave the address out for a cluster of this machine"
        ) from error


def use_token_where_it_is_asked_for(address: str) -> None:
    """Makes Ray send the token of `~/.ray/auth_token` if the cluster's head asks for one.

    `ray.init` sends the token only if RAY_AUTH_MODE says so. A head that asks for no token ends the workers of a
    process that sends one. Therefore the head is first asked without a token, and only if it refuses is the token used.
    Does nothing with a version of Ray that has no tokens.
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
        # The name in Ray 2.60. Older versions with tokens do not find the token file by themselves and lack it.
        getattr(setup, "maybe_enable_token_auth_if_token_available", lambda: False)()
    except (RayError, ConnectionError):
        return  # `ray.init` fails in the same way, and `join` reports it.


def token_refusal(error: Exception, address: str) -> str | None:
    """Returns a sentence with advice if the error means that the cluster wanted another token, else None."""
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
