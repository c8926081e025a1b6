"""What Ray says of a token it wanted is turned into what to do; whatever else it says stays as it is."""

import os

import pytest

from separation.ray_join import MODE, token_refusal, use_token_where_there_is_one


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


def test_a_mode_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "disabled")
    use_token_where_there_is_one()
    assert os.environ[MODE] == "disabled"
