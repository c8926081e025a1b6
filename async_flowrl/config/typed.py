"""The shell command of a run, restored from Hydra's record of it (`.hydra/`), for reports and resume hints."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf

from async_flowrl.config.compose import as_typed
from async_flowrl.config.paths import config_dir


def typed_command(hydra_record: Mapping[str, str], *, without: tuple[str, ...] = ()) -> str | None:
    """Returns the command that started the run; None if the record is incomplete, as for a run started from Python.

    `hydra_record` maps file names in `.hydra/` to their texts. Overrides of keys in `without` are left
    out, and so is `--config-dir` if it is in there.
    """
    return _command(hydra_record, without, ())


def resume_command(hydra_record: Mapping[str, str], output_dir: Path | None = None) -> str | None:
    """Returns the command that continues the run with `resume=auto`; None if the record is incomplete.

    `output_dir` is the run directory to continue; None means the one of the command, or the job's own folder in a
    sweep.
    """
    hydras = _hydras(hydra_record)
    if output_dir is None and str(OmegaConf.select(hydras, "hydra.mode")) in ("MULTIRUN", "RunMode.MULTIRUN"):
        output_dir = Path(str(OmegaConf.select(hydras, "hydra.runtime.output_dir")))
    if output_dir is None:
        return _command(hydra_record, ("resume",), ("resume=auto",))
    more = (f"output_dir={output_dir}", "resume=auto")
    return _command(hydra_record, ("resume", "output_dir"), more)


def record_of(run: Path) -> dict[str, str]:
    """Returns Hydra's record of a run directory, file name → text; empty for a run started from Python."""
    return {file.name: file.read_text(encoding="utf-8") for file in (run / ".hydra").glob("*.yaml")}


def _hydras(hydra_record: Mapping[str, str]) -> DictConfig:
    return cast("DictConfig", OmegaConf.create(hydra_record.get("hydra.yaml", "{}")))


def _command(hydra_record: Mapping[str, str], without: tuple[str, ...], more: tuple[str, ...]) -> str | None:
    if not {"hydra.yaml", "overrides.yaml"} <= hydra_record.keys():
        return None
    hydras = _hydras(hydra_record)
    name, folder = OmegaConf.select(hydras, "hydra.job.config_name"), _own_folder(hydras)
    overrides = OmegaConf.to_container(OmegaConf.create(hydra_record["overrides.yaml"]), resolve=False)
    given = [str(override) for override in overrides or ()]
    kept = [as_typed(override) for override in given if override.partition("=")[0].lstrip("+") not in without]
    where = ["--config-dir", folder] if folder and "--config-dir" not in without else []
    return shlex.join(["async-flowrl", "train", *where, *(["--config-name", str(name)] if name else []), *kept, *more])


def _own_folder(hydras: DictConfig) -> str | None:
    """Returns the folder of --config-dir, which Hydra lists beside the package's folder; None without one."""
    sources = OmegaConf.select(hydras, "hydra.runtime.config_sources") or []
    folders = [str(source["path"]) for source in sources if source["schema"] == "file"]
    own = [folder for folder in folders if Path(folder) != config_dir()]
    return own[0] if len(folders) > 1 and own else None
