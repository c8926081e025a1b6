"""Command line → checked configuration, with every refusal as one sentence before Hydra or Ray start anything."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathElement
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from async_flowrl.check import ConfigError, check, unknown_keys
from async_flowrl.config import Config, RewardTerm
from async_flowrl.naming import unknown_name
from async_flowrl.paths import config_dir
from async_flowrl.run_directory import RunDirectory

DEFAULT = "one_step_off"
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    int | None: "an integer or null",
    float | None: "a number or null",
    str | None: "text or null",
    list[str] | None: "a list of texts, such as [one,two], or null",
    list[int]: "a list of integers, such as [1,2]",
    list[int] | None: "a list of integers, such as [1,2], or null",
    tuple[float, float]: "two numbers, such as [0.9,0.99]",
    tuple[int, int] | None: "two integers, such as [0,5], or null",
    dict[str, RewardTerm]: "a dictionary of rewards, such as {ocr: {weight: 1.0}}",
}
"""Types of configuration fields in words."""


class GuardError(RuntimeError):
    """Another package shadows one of ours."""


def guard_imports() -> None:
    """PyPI's `checkpoint-engine` (Moonshot) installs the same import name; refuse to run on the wrong one."""
    ours = importlib.util.find_spec("separation")
    found = importlib.util.find_spec("checkpoint_engine")
    where = [Path(spec.origin).resolve().parent.parent if spec and spec.origin else None for spec in (ours, found)]
    if where[0] is None or where[0] != where[1]:
        raise GuardError(
            f"checkpoint_engine is imported from {where[1]}, but async_flowrl's own is in {where[0]}: another package "
            "of that name is installed; run `pip uninstall checkpoint-engine` and reinstall async-flowrl"
        )


def compose_checked(arguments: Sequence[str]) -> Config | None:
    """The configuration the command line describes, checked; None for Hydra's own commands (--help, --multirun, ...).

    Raises ConfigError.
    """
    parsed = get_args_parser().parse_args(list(arguments))
    if parsed.multirun or parsed.help or parsed.hydra_help or parsed.info or parsed.shell_completion:
        return None
    own = Path(parsed.config_dir).absolute() if parsed.config_dir else None
    config = typed(compose_overrides(parsed.config_name or DEFAULT, parsed.overrides, own))
    if not parsed.cfg:
        check_everything(config)
    return config


def compose_overrides(name: str, overrides: Sequence[str], own: Path | None = None) -> DictConfig:
    """Composes a named configuration with overrides; `own` is a folder beside the shipped one. Raises ConfigError."""
    folders = [config_dir(), *([own] if own else [])]
    name = name.removesuffix(".yaml")
    top = [path.stem for folder in folders for path in folder.glob("*.yaml") if path.stem != "base"]
    if name not in top:
        raise ConfigError(unknown_name("--config-name", name, top))
    _check_overrides(overrides, folders)
    search = create_config_search_path(str(folders[0]))
    if own:
        # The schemas must stay last.
        search.get_path().insert(-1, SearchPathElement("command-line", f"file://{own}"))
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        Hydra.create_main_hydra2(task_name="async_flowrl", config_search_path=search)
        composed = compose(name, list(overrides))
        OmegaConf.resolve(composed)
        return composed
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error)) from error
    finally:
        GlobalHydra.instance().clear()


def typed(composed: DictConfig) -> Config:
    """The dataclass tree behind a composed configuration. Raises ConfigError on keys the schema does not have."""
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    wrong = unknown_keys({str(key): value for key, value in values.items()}, Config)
    if wrong:
        raise ConfigError(wrong[0])
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.output_dir = str(Path(config.output_dir).expanduser())
    return config


def check_everything(config: Config) -> None:
    """Every check that needs no process: values, algorithm, batching, model, rewards, prompts, machine, output."""
    from async_flowrl.controller.launch import check_machine
    from async_flowrl.prepare import prepare

    check(config)
    check_machine(prepare(config))
    RunDirectory(Path(config.output_dir)).claim()


def _check_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Unknown keys (also with `+`) and unknown options of a group, with the nearest match."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(_explain(error)) from error
    for override, written in zip(parsed, overrides, strict=True):
        key = override.key_or_group
        if not key:
            raise ConfigError(f"{written!r} names no key; an override is written key=value")
        if key.startswith("hydra.") or "/" in key or key == "hydra":
            continue
        options = [path.stem for folder in folders for path in (folder / key).glob("*.yaml")]
        if options:
            if isinstance(value := override.value(), str) and value not in options:
                raise ConfigError(unknown_name(key, value, options))
            continue
        if wrong := unknown_keys(_nest(key.split(".")), Config):
            raise ConfigError(wrong[0])


def _nest(parts: Sequence[str]) -> dict[str, Any]:
    return {parts[0]: _nest(parts[1:]) if len(parts) > 1 else None}


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's explanations in one sentence; for a wrong type, what the key takes and what was given."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__cause__ or cause.__context__
    key = getattr(cause, "full_key", None)
    if sentence := _missing_term(f"{error}\n{error.__cause__ or ''}\n{cause or ''}"):
        return sentence
    if cause is not None and key and (expected := _expected(key)):
        reason = str(getattr(cause, "msg", cause)).splitlines()[0].rstrip(".")
        return f"{key} must be {expected}: {reason}"
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=")))


def _missing_term(text: str) -> str | None:
    """What to write instead of a key of a reward that the configuration does not have: Hydra adds terms whole."""
    found = re.search(r"not a subclass of RewardTerm[^\0]*?full_key: (\w+)", text)
    found = found or re.search(r"not in struct\s+full_key: reward\.terms\.(\w+)", text)
    if found is None:
        return None
    name = found[1]
    return f"the reward has no term {name!r}; one is added whole, like '+reward.terms={{{name}: {{weight: 1.0}}}}'"


def _expected(key: str) -> str | None:
    """The type of a configuration key in words; None where the schema does not say."""
    kind: Any = Config
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if not (isinstance(kind, type) and is_dataclass(kind)):
            entry = get_args(kind)[1:]
            if not (entry and is_dataclass(entry[0])):
                return None
            kind = entry[0]  # a dictionary of sections: this part is the section's own name
            continue
        kind = get_type_hints(kind).get(part)
    if isinstance(kind, type) and is_dataclass(kind):
        return f"a section with {', '.join(get_type_hints(kind))}"
    return WORDS.get(kind) or str(getattr(kind, "__name__", kind) if not get_args(kind) else kind)


ConfigStore.instance().store(name="schema", node=Config)
if not OmegaConf.has_resolver("expanduser"):
    OmegaConf.register_new_resolver("expanduser", lambda path: str(Path(path).expanduser()))
