"""Paths of shipped files: `configs/` of a checkout, or the copy of it inside an installed wheel."""

from pathlib import Path

from async_flowrl.config.messages import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def config_dir() -> Path:
    """The folder of shipped configurations and prompt lists. Raises FileNotFoundError if the installation lacks it."""
    checkout, wheel = _PACKAGE.parent / "configs", _PACKAGE / "configs"
    for folder in (wheel, checkout):  # the wheel's first: beside an installed package, `configs` may be anybody's
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the configuration folder is missing: neither {checkout} nor {wheel} exists")


def find_data(path: str, base: Path | None = None, *, key: str = "", folder: bool = False) -> Path:
    """An existing file, or also a folder where that is asked for.

    `~` is expanded; a relative path is looked up in `base` (the working directory), then among the shipped files.
    Raises FileNotFoundError naming `key` and the nearest file name in the folders searched.
    """
    given = Path(path).expanduser()
    roots = [Path()] if given.is_absolute() else [base or Path.cwd(), config_dir()]
    candidates = [root / given for root in roots]
    for candidate in candidates:
        if candidate.is_file() or (folder and candidate.is_dir()):
            return candidate
    problem = "is a folder, not a file" if any(candidate.is_dir() for candidate in candidates) else "does not exist"
    given_as, searched = f"{key}={path}" if key else path, " and ".join(map(str, candidates))
    raise FileNotFoundError(f"{given_as} {problem} (looked for {searched}){_hint(candidates)}")


def _hint(candidates: list[Path]) -> str:
    """The nearest file name in the first folder that has one."""
    for folder in [candidate.parent for candidate in candidates if candidate.parent.is_dir()]:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
        if hint := did_you_mean(candidates[0].name, names, folder.joinpath):
            return hint
    return ""
