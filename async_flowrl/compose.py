"""Command line → checked configuration, with every refusal as one sentence before Hydra or Ray start anything."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from async_flowrl.check import ConfigError, check, unknown_keys
from async_flowrl.config import Config
from async_flowrl.naming import unknown_name
from async_flowrl.paths import config_dir

DEFAULT = "one_step_off"


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
    folder = Path(parsed.config_dir or config_dir()).absolute()
    config = typed(compose_overrides(parsed.config_name or DEFAULT, parsed.overrides, folder))
    if not parsed.cfg:
        check_everything(config)
    return config


def compose_overrides(name: str, overrides: Sequence[str], folder: Path | None = None) -> DictConfig:
    """Composes a named configuration with overrides. Raises ConfigError."""
    folder = folder or config_dir()
    name = name.removesuffix(".yaml")
    top = [path.stem for path in folder.glob("*.yaml") if path.stem != "base"]
    if not (folder / f"{name}.yaml").exists():
        raise ConfigError(unknown_name("--config-name", name, top))
    _check_overrides(overrides, folder)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = compose(name, list(overrides))
            OmegaConf.resolve(composed)
            return composed
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from error
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
    """Every check that needs no process: values, algorithm, batching, model, rewards, prompts, output directory."""
    from async_flowrl.prepare import prepare

    check(config)
    prepare(config)


def _check_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Unknown keys (also with `+`) and unknown options of a group, with the nearest match."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(_first_line(error)) from error
    for override in parsed:
        key = override.key_or_group
        if key.startswith("hydra.") or "/" in key or key == "hydra":
            continue
        if (folder / key).is_dir():
            options = [path.stem for path in (folder / key).glob("*.yaml")]
            if isinstance(value := override.value(), str) and value not in options:
                raise ConfigError(unknown_name(key, value, options))
            continue
        if wrong := unknown_keys(_nest(key.split(".")), Config):
            raise ConfigError(wrong[0])


def _nest(parts: Sequence[str]) -> dict[str, Any]:
    return {parts[0]: _nest(parts[1:]) if len(parts) > 1 else None}


def _first_line(error: Exception) -> str:
    """Hydra's and OmegaConf's explanations without their indented bookkeeping."""
    text = f"{error}\n{error.__cause__ or ''}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("object_type=", "reference_type="))]
    return "; ".join(useful[:3])


ConfigStore.instance().store(name="schema", node=Config)
if not OmegaConf.has_resolver("expanduser"):
    OmegaConf.register_new_resolver("expanduser", lambda path: str(Path(path).expanduser()))
