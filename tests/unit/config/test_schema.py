"""Tests of the configuration's fields: each has a text, and its bounds and effects are as the text says."""

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin

import pytest

from async_flowrl.config.check import ConfigError, check, check_fields
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm, ServeConfig
from async_flowrl.config.settings import BOUNDS, NOTHING, ROUNDING, WEIGHTS, rule_of, settings
from async_flowrl.controller.resume import deciding, numerics
from tests.support.documents import script

WRITER = script("docs/write_configuration.py")


@dataclass(frozen=True)
class Known:
    """A field of the schema: its text, and what changing it does, the mark of its section included."""

    member: Field[Any]
    text: str
    changes: str


def schema(section: Any, prefix: str = "", changes: str = WEIGHTS) -> Iterator[tuple[str, Known]]:
    _, texts = WRITER.texts(section)
    for member in fields(section):
        mark = rule_of(member).changes if changes == WEIGHTS else changes
        if is_dataclass(member.type):
            yield from schema(member.type, f"{prefix}{member.name}.", mark)
            continue
        yield prefix + member.name, Known(member, texts.get(member.name, ""), mark)
        named = ".<name>." if get_origin(member.type) is dict else "."
        for entry in filter(is_dataclass, get_args(member.type)):
            yield from schema(entry, f"{prefix}{member.name}{named}", mark)


FIELDS = dict(schema(Config))
RULES = {key: rule_of(known.member) for key, known in FIELDS.items()}


def full() -> Config:
    """A configuration that has every section, a reward among them."""
    config = Config(reward=RewardConfig(terms={"<name>": RewardTerm(serve=ServeConfig())}))
    config.evaluate.reward.terms = {"<name>": RewardTerm(serve=ServeConfig())}
    return config


def put(config: Config, key: str, value: object) -> Config:
    *parents, last = key.split(".")
    target: Any = config
    for parent in parents:
        target = target[parent] if isinstance(target, dict) else getattr(target, parent)
    setattr(target, last, value)
    return config


def numbers_in(kind: Any) -> set[Any]:
    return {kind} & {int, float} | {inner for part in get_args(kind) for inner in numbers_in(part)}


def test_every_field_has_a_text() -> None:
    assert len(FIELDS) > 200
    texts = {key: known.text for key, known in FIELDS.items()}
    assert {key: text for key, text in texts.items() if len(text.split()) < 2 or not text.endswith(".")} == {}


def test_every_field_has_one_row_on_the_page() -> None:
    """But those of held-out terms, which are the same as those of trained ones."""
    rows = re.findall(r"^\| `([\w.<>]+)` = ", WRITER.page(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(key for key in FIELDS if not key.startswith("evaluate.reward.terms.<name>."))


def test_other_names_are_refused() -> None:
    chosen = [key for key, rule in RULES.items() if rule.choices]
    assert len(chosen) > 20
    for key in chosen:
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be one of .*, got '\?\?\?'$"):
            check(put(full(), key, "???"))


OUTSIDE = {
    (key, name): bound + {"at_least": -1, "above": 0, "at_most": 1, "below": 0}[name]
    for key, rule in RULES.items()
    for name in BOUNDS
    if (bound := getattr(rule, name)) is not None
}


def test_values_outside_the_bounds_are_refused() -> None:
    assert len(OUTSIDE) > 80
    for (key, name), number in OUTSIDE.items():
        value = (0.5, number) if RULES[key].pair else number
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)} must be .*{name.replace('_', ' ')} [\d.]+.*, got "):
            check(put(full(), key, value))


FLOATS = [key for key, known in FIELDS.items() if float in numbers_in(known.member.type)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite_except_where_infinity_means_no_limit(value: float) -> None:
    def refusal(key: str) -> str:
        try:
            check_fields(put(full(), key, (value, value) if RULES[key].pair else value))
        except ConfigError as error:
            return str(error).partition(" must be ")[0]
        return "allowed"

    unlimited = [key for key in FLOATS if RULES[key].infinite and value == math.inf]
    assert {key: refusal(key) for key in FLOATS} == {key: "allowed" if key in unlimited else key for key in FLOATS}


def other(value: Any, kind: Any) -> Any:
    """Another value of the same type; checks are not asked, so it need not make sense."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple):
        return tuple(number / 2 for number in value)
    if isinstance(value, dict | list):
        return type(value)(["x"] if isinstance(value, list) else {"x": 1})
    return "x" if str in get_args(kind) else 7


def test_what_a_field_changes_is_what_the_fingerprint_of_a_run_sees() -> None:
    before = full()
    before.trainer.lr_schedule = "linear"  # then total_steps counts too
    values = {name: value for name, value, _ in settings(before)}
    weights, roundings = deciding(before), numerics(before, "cpu")

    def seen(key: str) -> set[str]:
        value = values.get(key)  # None of a section that may be null
        after = put(deepcopy(before), key, other(value, FIELDS[key].member.type))
        changed = {WEIGHTS: deciding(after) != weights, ROUNDING: numerics(after, "cpu") != roundings}
        return {name for name, differs in changed.items() if differs} or {NOTHING}

    assert {key: seen(key) for key in FIELDS} == {key: {known.changes} for key, known in FIELDS.items()}


@pytest.mark.parametrize(
    ("mode", "max_staleness", "hand_over"),
    [("sync", 0, "batch"), ("stream", 0, "stream"), ("one_step_off", 1, "batch"), ("fully_async", 3, "stream")],
)
def test_a_mode_is_a_name_for_two_settings(mode: str, max_staleness: int, hand_over: str) -> None:
    config = put(put(full(), "max_staleness", max_staleness), "hand_over", hand_over)
    assert config.mode is None and config.mode_name == mode
    check(config)
    check(put(config, "mode", mode))
    for another in {"sync", "stream", "one_step_off", "fully_async"} - {mode}:
        with pytest.raises(ConfigError, match=rf"^mode={another} means (max_staleness|hand_over)=.*, got "):
            check(put(config, "mode", another))


def test_three_terms_in_another_order_round_differently() -> None:
    def of(names: str) -> Config:
        return Config(reward=RewardConfig(terms={name: RewardTerm() for name in names}))

    assert deciding(of("abc")) == deciding(of("cba"))
    assert numerics(of("abc"), "cpu") != numerics(of("cba"), "cpu")
    assert numerics(of("ab"), "cpu") == numerics(of("ba"), "cpu")
