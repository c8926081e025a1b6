"""Models of rewards: checks of paths, revisions and devices, and reading of weight files."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.paths import expanded

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")


def check_model_options(reward: str, *, device: str, batch_size: int, scale: float = 1.0) -> None:
    """Raises ValueError for an unknown `device`, a `batch_size` below 1, or a `scale` not finite and above 0."""
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        raise ValueError(unknown_name(f"the {reward} reward's device", device, DEVICES))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"the {reward} reward's batch_size must be an integer of at least 1, got {batch_size!r}")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"the {reward} reward's scale must be a finite number above 0, got {scale!r}")


def choose_device(reward: str, option: str) -> "torch.device":
    """Returns the device; "auto" is a GPU if this process sees one, else the CPU. Raises ValueError without a GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu") if option == "auto" else torch.device(option)
    if device.type == "cuda" and not has_gpu:
        raise ValueError(
            f"the {reward} reward's device is {option}, and this process sees no GPU: give its workers one "
            f"(gpus_per_worker of the reward or of its term), or use auto or cpu"
        )
    return device


class MissingPath(ValueError):
    """A local path that does not exist, whatever the prompt."""


def check_path(reward: str, option: str, place: str) -> None:
    # A name of the form owner/name may be a hub repository, and is first looked up when the weights are loaded.
    path = expanded(place)
    if not path.exists() and (path.is_absolute() or place.startswith((".", "~")) or place.count("/") != 1):
        what = f"the {reward} reward's {option} {place!r}"
        raise MissingPath(f"{what} is no file or folder here, and no owner/name of the hub")


def check_pins(reward: str, **pins: tuple[str, str | None]) -> None:
    """Raises ValueError if only some hub repositories are pinned to a commit; `pins`: option → (place, commit)."""
    hub = {option: pin for option, pin in pins.items() if not expanded(pin[0]).exists()}
    unpinned = " and ".join(f"{option} (of {place})" for option, (place, revision) in hub.items() if revision is None)
    pinned = " and ".join(option for option, (_, revision) in hub.items() if revision is not None)
    if pinned and unpinned:
        raise ValueError(
            f"the {reward} reward's {pinned} pins only a part of what it loads: give {unpinned} too, or none"
        )


@contextmanager
def loading(reward: str, place: str) -> Iterator[None]:
    """Turns an error of loading inside the `with` block (OSError, KeyError) into a ValueError of one sentence."""
    try:
        yield
    except (OSError, KeyError) as error:  # transformers and the hub raise OSError for missing files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = f"https://huggingface.co/{place}" if not Path(place).exists() else place
        raise ValueError(
            f"the weights of the {reward} reward cannot be loaded from {place}: {lines[0].rstrip('.')}; they come from "
            f"{where} (to fetch them before a run: hf download {place})"
        ) from error


def weights_file(place: str, filename: str, revision: str | None) -> Path:
    """Returns the file `place`, or `filename` of the folder or hub repository `place`. Raises OSError."""
    path = expanded(place)
    if path.is_file():
        return path
    if path.is_dir():
        return path / filename
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(place, filename, revision=revision))


def read_weights(path: Path) -> dict[str, "torch.Tensor"]:
    """Returns the tensors of a safetensors or torch file by name; no code of a torch file runs."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded: dict[str, Any] = load_file(path)
        return loaded
    import torch

    loaded = torch.load(path, map_location="cpu", weights_only=True)
    state: dict[str, Any] = loaded.get("state_dict", loaded)
    return state
