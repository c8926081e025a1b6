"""Composition of a configuration: from a command line, by Hydra, to the dataclass `Config`.

Programs call `compose_config`; main.py, which also starts Hydra's own sweeps, calls its parts. Every refusal is a
ConfigError of one sentence.
"""

import copy
import functools
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigIndexError, ConfigKeyError, ConfigTypeError, OmegaConfBaseException, ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from async_flowrl.config.check import ConfigError, removed, section_or_null, unknown_keys
from async_flowrl.config.error_text import as_written, did_you_mean, first_line, unknown_name
from async_flowrl.config.models import is_toy
from async_flowrl.config.own_code import absolute
from async_flowrl.config.paths import config_dir, expanded
from async_flowrl.config.resolution import normalised
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.config.settings import settings

logger = logging.getLogger(__name__)

# Configuration that is used if none is named.
DEFAULT = "one_step_off"
# Experiment with which the modes start, if the model is a tiny one.
EXPERIMENT = "two_prompts"
# Group of configs/ → the key that takes a path or a name of one's own.
OWN = {"algorithm": "algorithm.name", "data": "data.train", "model": "model.path", "reward": "reward.terms"}
# Version of Hydra whose defaults apply.
VERSION_BASE = "1.3"
# Hydra's own settings without its help, logging, launchers and sweepers: they take a third of the time of composing,
# and only what Hydra starts (a sweep) reads them. A file of one's own can still choose them.
UNREAD = ("help", "hydra_help", "hydra_logging", "job_logging", "callbacks", "env", "launcher", "sweeper")
LIGHT = OmegaConf.structured(HydraConf(defaults=[{"output": "default"}, *({group: None} for group in UNREAD)]))
# Type of a configuration field → the type in words, for messages.
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    int | None: "an integer or null",
    float | None: "a number or null",
    str | None: "text or null",
    list[str] | None: "a list of texts, such as [one,two], or null",
    list[Any]: "a list of sizes, such as [512,[448,576]]",
    list[int]: "a list of integers, such as [1,2]",
    list[int] | None: "a list of integers, such as [1,2], or null",
    tuple[float, float]: "two numbers, such as [0.9,0.99]",
    tuple[int, int] | None: "two integers, such as [0,5], or null",
    dict[str, Any]: "a dictionary, such as {channel: red}",
    dict[str, str]: "a dictionary of texts, such as {NCCL_DEBUG: WARN}",
    dict[str, RewardTerm]: "a dictionary of rewards, such as {ocr: {weight: 1.0}}",
    RewardTerm: "a dictionary, such as {weight: 1.0}",
}


def compose_config(name: str = DEFAULT, overrides: Sequence[str] = (), folder: Path | None = None) -> Config:
    """Returns the configuration `name` with overrides; `folder` holds others than the shipped. Raises ConfigError."""
    return typed(composed(name, overrides, folder))


def composed(name: str, overrides: Sequence[str], folder: Path | None = None) -> DictConfig:
    """Returns what Hydra composes from a command line, with its own settings that a run reads. Raises ConfigError."""
    written = with_replaced_terms(name, checked(name, overrides, folder), folder)
    values = _composed(name, written, folder)
    if left_out := _left_out(values, written):
        values = _composed(name, [*written, *left_out], folder)
    return values


def for_hydra(name: str, overrides: Sequence[str], folder: Path | None = None) -> list[str]:
    """Returns the overrides with which Hydra itself composes what `composed` does, for a sweep too."""
    written = with_replaced_terms(name, overrides, folder)
    plain = [override for override in written if not parse(override).is_sweep_override()]
    return [*written, *_left_out(_composed(name, plain, folder), written)]


def _left_out(values: DictConfig, written: Sequence[str]) -> list[str]:
    named = any(parse(override).key_or_group == "experiment" for override in written)
    default = values.hydra.runtime.choices.get("experiment") == EXPERIMENT
    return [] if named or not default or is_toy(values.model.path) else ["~experiment"]


def _in_grammar(override: str, *, sweeps: bool) -> str:
    # Only `null`, a whole text in quotes, and `${…}` mean more than their characters; with `sweeps` (--multirun) also
    # commas, which separate texts, and Hydra's own sweeps such as `choice(a,b)`.
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    kind, free = _field(name)
    if not equals or key.startswith("~") or is_hydras(override):
        return override
    if kind in (str, str | None):
        value = _text(value, sweeps=sweeps)
    exists = kind is not None and key.startswith("+") and not is_dataclass(kind)  # Hydra would refuse the one +
    return f"{'++' if free or exists else key[: -len(name)]}{name}={value}"


def _text(value: str, *, sweeps: bool) -> str:
    try:
        parsed = parse(f"text={value}")
    except HydraException:
        return ",".join(_text(part, sweeps=False) for part in value.split(",")) if sweeps else _quoted(value)
    if parsed.is_sweep_override():
        return value if sweeps else _quoted(value)
    read = parsed.value()
    in_quotes = isinstance(read, str) and value[:1] in ("'", '"') and value[:1] == value[-1:]
    return value if read is None or read == value or in_quotes else _quoted(value)


def _quoted(text: str) -> str:
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", "\\'"), text) + "'"


def as_typed(override: str) -> str:
    """Returns the shortest form in which a text of a command line was given, without the quotes of Hydra's grammar."""
    key, _, value = override.partition("=")
    text = parse(override).value() if value[:1] == "'" else None
    plain = f"{key}={text}"
    return plain if isinstance(text, str) and _in_grammar(plain, sweeps=False) == override else override


def with_replaced_terms(name: str, overrides: Sequence[str], folder: Path | None = None) -> list[str]:
    """Adds deletions of the old terms before an override that replaces all terms of a reward. Raises ConfigError."""
    written = list(overrides)
    for key in TERMS:
        parsed = [(text, parse(text)) for text in written]
        below = [(text, override) for text, override in parsed if _under(key, override)]
        whole = [text for text, override in below if override.key_or_group == key and _gives_terms(override)]
        deleted, added = [], []
        if whole:
            plain = [(text, override) for text, override in parsed if not override.is_sweep_override()]
            others = [text for text, override in plain if not any(_under(terms, override) for terms in TERMS)]
            deleted = [f"~{key}.{term}" for term in OmegaConf.select(_composed(name, others, folder), key) or {}]
            added = [f"+{key}={whole[-1].partition('=')[2]}"]
        rest = [_added(key, override) for text, override in below if text not in (*whole, *deleted)]
        written = [*(text for text, override in parsed if not _under(key, override)), *deleted, *added, *rest]
    return written


def _composed(name: str, overrides: Sequence[str], folder: Path | None) -> DictConfig:
    name = name.removesuffix(".yaml")
    # Hydra looks for the primary configuration in the first folder only.
    both = [config_dir(), *([folder.absolute()] if folder else [])]
    folders = sorted(both, key=lambda place: not (place / f"{name}.yaml").exists())
    quotable = [str(other).replace("'", "\\'") for other in folders[1:]]
    others = [f"hydra.searchpath=['file://{other}']" for other in quotable]
    try:
        with (
            initialize_config_dir(str(folders[0]), job_name="async_flowrl", version_base=VERSION_BASE),
            registered(light=not any(map(is_hydras, overrides))),
        ):
            return compose(name, [*others, *overrides], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error)) from error


@contextmanager
def registered(*, light: bool) -> Iterator[None]:
    """Inside, Hydra does not copy what is registered with it; `light` leaves out its own settings in UNREAD.

    Within or after initialize_config_dir, which registers what Hydra's plugins have: here that would be forgotten.
    """
    store = ConfigStore.instance()
    whole, hydras = store.repo, store.repo["hydra"]
    if light:
        hydras = {**hydras, "config.yaml": replace(hydras["config.yaml"], node=LIGHT)}
    store.repo = _Shared(whole, hydra=hydras)
    try:
        yield
    finally:
        store.repo = whole


class _Shared(dict[str, Any]):
    """What is registered with Hydra, which would copy it for every composition and every group of `--help`."""

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


def typed(values: DictConfig) -> Config:
    """Returns a composed configuration as the dataclass. Raises ConfigError for unknown keys and wrong types."""
    if OmegaConf.get_type(values) is not Config:
        raise ConfigError(
            "a file of your own begins with a mode (`defaults: [one_step_off, _self_]`), this one has none"
        )
    try:
        plain = _sections(values, lambda section: OmegaConf.to_container(section, resolve=True))
        if wrong := next(unknown_keys(plain, Config), None):
            raise ConfigError(wrong)
        config = Config(**_sections(values, OmegaConf.to_object))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    config.output_dir = str(expanded(config.output_dir))
    return normalised(with_absolute_files(config))


def _sections(values: DictConfig, read: Callable[[Any], Any]) -> dict[str, Any]:
    # Without a copy of `values`, which takes longer than the rest.
    names = [str(name) for name in values if name != "hydra"]
    return {name: read(values[name]) if OmegaConf.is_config(values[name]) else values[name] for name in names}


def with_absolute_files(config: Config) -> Config:
    config.model.family, config.model.tiny.family = absolute(config.model.family), absolute(config.model.tiny.family)
    config.algorithm.name = absolute(config.algorithm.name)
    for term in (*config.reward.terms.values(), *config.evaluate.reward.terms.values()):
        term.name = term.name and absolute(term.name)
    return config


def without_hydra(values: DictConfig) -> DictConfig:
    job = copy.deepcopy(values)
    with read_write(job), open_dict(job):
        job.pop("hydra", None)
    return job


def read_config(path: Path) -> Config:
    """Reads the config.yaml of a run. Raises ValueError if the file is not the configuration of a run."""
    # Settings that this version does not have are left out with a warning, since another version may have written the
    # file.
    unknown: list[str] = []
    try:
        written = cast("DictConfig", OmegaConf.load(path))
        merged = _merged(written, unknown)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not the configuration of a run: {first_line(error)}") from error
    if missing := [name for name in SECTIONS if name not in written]:
        raise ValueError(f"{path} is damaged, or not the configuration of a run: it has no {', '.join(missing)}")
    if unknown:
        logger.warning("%s has settings that this version does not know: %s", path, ", ".join(unknown))
    return normalised(cast("Config", OmegaConf.to_object(merged)))


# Sections that every config.yaml of a run has; `runtime` is the last one.
SECTIONS = ("model", "rollout", "trainer", "reward", "data", "runtime")


@functools.cache
def _schema() -> DictConfig:
    return cast("DictConfig", OmegaConf.structured(Config))


def _merged(written: DictConfig, unknown: list[str]) -> Any:
    while True:
        try:
            return OmegaConf.merge(_schema(), written)  # merge works on copies
        except ConfigKeyError as error:
            key = str(error.full_key)
            section, _, name = key.rpartition(".")
            owner = OmegaConf.select(written, section) if section else written
            if len(written) == 1 and not section:  # no key of the file is known
                raise
            del owner[name]
            unknown += [] if removed(key) else [key]


def checked(name: str, overrides: Sequence[str], folder: Path | None = None, *, sweeps: bool = False) -> list[str]:
    """Returns the overrides in Hydra's grammar; `sweeps` (--multirun) allows several values of one key.

    Raises ConfigError, with the nearest match, for unknown names, options and keys, and for values that cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir {folder} is no folder")
    folders = [config_dir(), *([folder] if folder else [])]
    top = [path.stem for place in folders for path in place.glob("*.yaml") if path.stem != "base"]
    if name.removesuffix(".yaml") not in top:
        raise ConfigError(unknown_name("--config-name", name, top))
    written = [_in_grammar(override, sweeps=sweeps) for override in overrides]
    for override, readable in zip(overrides, written, strict=True):
        if any(0xDC80 <= ord(letter) <= 0xDCFF for letter in override):
            raise ConfigError(f"{override!r} is text that this locale cannot read: set PYTHONUTF8=1")
        prefixed, equals, text = override.partition("=")
        key = prefixed.lstrip("+~")
        if not key or not (equals or prefixed.startswith("~")):
            raise ConfigError(f"{override!r} is no override: it is written key=value")
        options = [path.stem for place in folders for path in (place / key).glob("*.yaml")]
        nested = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), cast("Any", None))
        if not (options or is_hydras(key)) and (wrong := next(unknown_keys(nested, Config), None)):
            groups = [f"{path.parent.name}={path.stem}" for place in folders for path in place.glob("*/*.yaml")]
            near = did_you_mean(f"{key}={text}", groups, mistyped=True)
            raise ConfigError(f"configuration key {key} is unknown{near}" if near else wrong)
        if prefixed.startswith("~") and not options and get_origin(_field(key.rpartition(".")[0])[0]) is not dict:
            raise ConfigError(f"{prefixed}: only entries of a dictionary, such as ~reward.terms.color, can be deleted")
        value, obstacle = _value(readable, sweeps=sweeps)
        unnamed = not prefixed.startswith("~") and not isinstance(value, str | list | dict)
        if options and (unnamed or (isinstance(value, str) and value not in options)):
            own = f"; what is your own is given by {OWN[key]}" if key in OWN and re.search("[./:]", text) else ""
            raise ConfigError(f"{unknown_name(key, text, options)}{own}")
        if obstacle:
            raise ConfigError(f"{key} must be {_expected(key) or 'one value'}, got {text!r}{obstacle}")
    return written


def _value(override: str, *, sweeps: bool) -> tuple[Any, str]:
    """Returns the value of an override, and why it cannot be read (empty if it can)."""
    value = override.partition("=")[2]
    if re.search(r"\$\{[^}]*$", value):
        return value, ": ${ begins a reference such as ${name}, and } ends it"
    try:
        parsed = parse(override)
    except HydraException:
        if re.search(r"[{,]\s*['\"][^'\"]*['\"]\s*:", value):
            return value, ": names in braces stand without quotes, and are words of letters, digits, - and _"
        return value, ": what holds other characters than letters, digits and spaces stands in quotes of its own"
    if parsed.is_sweep_override() and not sweeps:
        return value, ": a list stands in brackets, and several runs need --multirun"
    return parsed.value(), ""


def is_hydras(override: str) -> bool:
    """Returns True for overrides of Hydra itself: `hydra.verbose=true`, `hydra/launcher=basic`, `experiment/x@y=z`."""
    key = override.lstrip("+~").partition("=")[0]
    return key == "hydra" or key.startswith("hydra.") or "/" in key


def explain(error: Exception) -> str:
    """Returns one sentence for an error of Hydra or OmegaConf; of a wrong type, which type the key takes."""
    causes: list[BaseException | None] = [error]
    while (cause := causes[-1]) and not isinstance(cause, ValidationError | ConfigTypeError | ConfigIndexError):
        following = cause.__cause__ or cause.__context__
        causes.append(None if following in causes else following)  # under a debugger OmegaConf's errors form a circle
    key = re.sub(r"\[\d+\]", "", str(getattr(cause, "full_key", None) or ""))
    text = f"{error}\n{error.__cause__ or ''}\n{cause or ''}"
    unknown = re.search(r"Key '\w+' not in '\w+'\s+full_key: ([\w.]+)", text)
    if sentence := removed(unknown[1]) if unknown else _missing_term(text):
        return sentence
    if unknown and is_dataclass(kind := _field(unknown[1].rpartition(".")[0])[0]):
        section, _, name = unknown[1].rpartition(".")
        return unknown_name(f"a key of {section}", name, get_type_hints(kind))
    if cause is not None and key and (expected := _expected(key)):
        reason = str(getattr(cause, "msg", cause)).splitlines()[0].rstrip(".")
        default = {name: value for name, value, _ in settings(Config())}.get(key)
        null = "null" if default is None else f"null; its default is {as_written(default)}"
        return f"{key} must be {expected}" + (f", got {null}" if "is not Optional" in reason else f": {reason}")
    if missing := re.search(r"(?i)missing mandatory value: (\w+)(?:\s+full_key: ([\w.]+))?", text):
        return f"{missing[2] or missing[1]} has no value: ??? stands for one that is still missing"
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if line.strip()]
    shown = "; ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=", "full_key:")))
    return f"{full}: {shown}" if (full := getattr(error, "full_key", None)) else shown


def _missing_term(text: str) -> str | None:
    match = re.search(r"not a subclass of RewardTerm[^\0]*?full_key: (\w+)\s", text)
    match = match or re.search(r"not in struct\s+full_key: reward\.terms\.(\w+)", text)
    if match is None:
        return None
    return f"the reward has no term {match[1]!r}; one is added whole, like '+reward.terms.{match[1]}={{weight: 1.0}}'"


def _field(key: str) -> tuple[Any, bool]:
    kind, free = cast("Any", Config), False
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if isinstance(kind, type) and is_dataclass(kind):
            kind = section_or_null(get_type_hints(kind).get(part))
        else:  # the part is a name in a dictionary, of sections or of values
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
        free = free or (get_origin(kind) is dict and not is_dataclass(get_args(kind)[1]))
    return kind, free


def _expected(key: str) -> str | None:
    kind, _ = _field(key)
    if isinstance(kind, type) and is_dataclass(kind) and kind not in WORDS:
        return f"a section with {', '.join(get_type_hints(kind))}"
    if kind in (None, Any):
        return None
    return WORDS.get(kind) or str(getattr(kind, "__name__", kind) if not get_args(kind) else kind)


# Dictionaries of reward terms. An override that gives one whole replaces all its terms, where Hydra would merge both,
# so that the configuration's terms would silently be trained as well. `+reward.terms.NAME={...}` adds a term,
# `reward.terms.NAME.weight=2` changes one, `~reward.terms.NAME` removes one.
TERMS = ("reward.terms", "evaluate.reward.terms")


@functools.lru_cache(maxsize=1024)
def parse(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def _gives_terms(override: Override) -> bool:
    return not override.is_delete() and (override.is_sweep_override() or isinstance(override.value(), dict))


def _under(key: str, override: Override) -> bool:
    return override.key_or_group == key or override.key_or_group.startswith(f"{key}.")


def _added(key: str, override: Override) -> str:
    """Rewrites `+reward.terms.ocr={...}`, because Hydra can only merge a term into the dictionary of all terms."""
    line, name = str(override.input_line), override.key_or_group.removeprefix(f"{key}.")
    if not (override.is_add() or override.is_force_add()) or "." in name or name == key:
        return line
    if override.is_sweep_override() or not _gives_terms(override):
        return line
    return f"+{key}={{{name}: {line.partition('=')[2]}}}"


def typed_command(hydra_record: Mapping[str, str], *, without: tuple[str, ...] = ()) -> str | None:
    """Returns the command that started the run, but for overrides of keys in `without`; None if it is not recorded."""
    return _command(hydra_record, without, ())


def resume_command(hydra_record: Mapping[str, str], output_dir: Path | None = None) -> str | None:
    """Returns the command that continues the run, in `output_dir` or where it was; None if the record is incomplete."""
    hydras = _hydra_settings(hydra_record)
    if output_dir is None and str(OmegaConf.select(hydras, "hydra.mode")) in ("MULTIRUN", "RunMode.MULTIRUN"):
        output_dir = Path(str(OmegaConf.select(hydras, "hydra.runtime.output_dir")))
    if output_dir is None:
        return _command(hydra_record, ("resume",), ("resume=auto",))
    more = (f"output_dir={output_dir}", "resume=auto")
    return _command(hydra_record, ("resume", "output_dir"), more)


def record_of(run: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in (run / ".hydra").glob("*.yaml")}


def _hydra_settings(hydra_record: Mapping[str, str]) -> DictConfig:
    return cast("DictConfig", OmegaConf.create(hydra_record.get("hydra.yaml", "{}")))


def _command(hydra_record: Mapping[str, str], without: tuple[str, ...], more: tuple[str, ...]) -> str | None:
    if not {"hydra.yaml", "overrides.yaml"} <= hydra_record.keys():
        return None
    hydras = _hydra_settings(hydra_record)
    name, folder = OmegaConf.select(hydras, "hydra.job.config_name"), _own_folder(hydras)
    overrides = OmegaConf.to_container(OmegaConf.create(hydra_record["overrides.yaml"]), resolve=False)
    kept = [as_typed(str(o)) for o in overrides or () if str(o).partition("=")[0].lstrip("+") not in without]
    where = ["--config-dir", folder] if folder and "--config-dir" not in without else []
    return shlex.join(["async-flowrl", "train", *where, *(["--config-name", str(name)] if name else []), *kept, *more])


def _own_folder(hydras: DictConfig) -> str | None:
    sources = OmegaConf.select(hydras, "hydra.runtime.config_sources") or []
    folders = [str(source["path"]) for source in sources if source["schema"] == "file"]
    others = [folder for folder in folders if Path(folder) != config_dir()]
    return others[0] if len(folders) > 1 and others else None


ConfigStore.instance().store(name="schema", node=Config)
if not OmegaConf.has_resolver("expanduser"):
    OmegaConf.register_new_resolver("expanduser", lambda path: str(expanded(path)))
