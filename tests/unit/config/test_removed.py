"""Tests of configuration keys that are gone: they are refused with what to use instead."""

from dataclasses import fields

import pytest

from async_flowrl.config.check import REMOVED, ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config


@pytest.mark.parametrize("key", ["debug.delays.update=1", "+debug.freeze_publish=true"])
def test_a_removed_key_is_refused_with_its_replacement(key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose_config(overrides=[key])
    assert REMOVED["debug"] in str(refusal.value)


def test_no_removed_key_is_in_the_schema() -> None:
    assert not {field.name for field in fields(Config)} & set(REMOVED)
