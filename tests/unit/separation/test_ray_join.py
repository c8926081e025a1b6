"""Tests of joining a cluster that needs a token: a missing token is explained, other errors stay as they are."""

import pytest

from separation.ray_cluster import MODE, token_refusal


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
