"""Tests of joining a cluster that needs a token: a missing token is explained, other errors stay as they are."""

import os

import pytest
from ray import exceptions

from separation.ray_cluster import MODE, token_refusal, use_token_where_it_is_asked_for

ADDRESS = "127.0.0.1:6379"


class AuthenticationError(Exception):
    """As Ray names it."""


@pytest.mark.parametrize("error", [AuthenticationError("no"), RuntimeError("RPC error: InvalidAuthToken: missing")])
def test_a_missing_token_is_explained(error: Exception) -> None:
    sentence = token_refusal(error, "10.0.0.1:6379")
    assert sentence is not None and f"export {MODE}=token" in sentence and "10.0.0.1:6379" in sentence


def test_a_missing_token_is_found_behind_another_failure() -> None:
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("RPC error: InvalidAuthToken: missing")
    assert token_refusal(error, "10.0.0.1:6379") is not None


def test_another_failure_is_not_about_the_token() -> None:
    assert token_refusal(ConnectionError("refused"), "10.0.0.1:6379") is None


class Head:
    """Of a cluster that asks for its token, or does not."""

    def __init__(self, refusal: Exception | None) -> None:
        self.refusal = refusal

    def __call__(self, address: str) -> "Head":
        assert address == ADDRESS
        return self

    def internal_kv_keys(self, prefix: bytes, namespace: object) -> list[bytes]:
        if self.refusal is not None:
            raise self.refusal
        return []


REFUSED = getattr(exceptions, "AuthenticationError", None)
"""Ray's error, in versions that know tokens."""


@pytest.mark.skipif(REFUSED is None, reason="this version of Ray has no tokens")
@pytest.mark.parametrize("refusal", [None, REFUSED and REFUSED("no"), exceptions.RaySystemError("gone")])
@pytest.mark.parametrize("known", [True, False])
def test_the_token_is_used_where_the_head_asks_for_it(
    refusal: Exception | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that asks for none ends the workers of a process that sends one. Some versions of Ray find no token."""
    from ray._private.authentication import authentication_token_setup as setup

    name, asked = "maybe_enable_token_auth_if_token_available", []
    monkeypatch.delenv(MODE, raising=False)
    monkeypatch.setattr("ray._raylet.GcsClient", Head(refusal))
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", lambda address: address)
    if known:
        monkeypatch.setattr(setup, name, lambda: asked.append(True))
    else:
        monkeypatch.delattr(setup, name)
    use_token_where_it_is_asked_for(ADDRESS)
    assert bool(asked) == (known and isinstance(refusal, REFUSED or ()))


def test_a_mode_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "disabled")
    use_token_where_it_is_asked_for(ADDRESS)
    assert os.environ[MODE] == "disabled"
