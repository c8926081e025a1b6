"""Passes metrics and images of a running training to its views: console, TensorBoard, Weights & Biases (W&B)."""

import itertools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

from async_flowrl.config.schema import MonitorConfig
from async_flowrl.image_file import opened
from async_flowrl.observability.contact_sheet import contact_sheets
from async_flowrl.types import ByteArray, Prompt, Scores

logger = logging.getLogger(__name__)

# Metric that is the x axis of evaluations in W&B: the policy version that was evaluated.
VERSION_KEY = "evaluation/version"
# Most single images per evaluation that are sent to W&B: the first ones of every prompt, of each at least one.
MAX_SAMPLES = 64
MAX_SOURCE_SIDE = 512  # In pixels, of an edited image that is sent.
PACKAGES = ("async-flowrl", "torch", "diffusers", "transformers", "peft", "ray", "vllm-omni")

# Metric of this project → name of the same metric in verl-omni; metrics with another meaning there are left out.
VERL_OMNI = {
    "step": "training/global_step",
    "images": "perf/total_num_images",
    "reward/mean": "critic/rewards/mean",
    "zero_std_ratio": "critic/rewards/zero_std_ratio",
    "loss": "actor/loss",
    "ratio/mean": "actor/ratio_mean",
    "clip_fraction": "actor/pg_clipfrac",
    "kl": "actor/kl_loss",
    "grad_norm": "actor/grad_norm",
    "positive_loss": "actor/positive_loss",
    "negative_loss": "actor/negative_loss",
    "old_deviation": "actor/old_deviate",
    "timing/step": "perf/time_per_step",
    "timing/update": "timing_s/update_actor",
    "timing/publish": "timing_s/update_weights",
    "memory/trainer": "perf/max_memory_reserved_gb",
}
ALIASES = {"none": {}, "verl_omni": VERL_OMNI}


class View:
    """A view of a run, which shows nothing; subclasses override what they show. Monitor explains the methods."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(
        self, version: int, prompts: Sequence[Prompt], images: Sequence[ByteArray], scores: Sequence[Scores]
    ) -> None: ...

    def close(self) -> None: ...


def scalars(metrics: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, float]:
    """All metrics that are numbers, under their names and aliases (name → alias); `step` only under its alias."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    under_aliases = {alias: numbers[name] for name, alias in aliases.items() if name in numbers}
    return {name: value for name, value in numbers.items() if name != "step"} | under_aliases


class Tensorboard(View):
    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))
        self._aliases = aliases

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics, self._aliases).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self.log(version, {f"evaluation/{name}": value for name, value in metrics.items()})

    def image(self, path: Path, version: int) -> None:
        from PIL import Image

        self._writer.add_image("images", np.asarray(Image.open(path).convert("RGB")), version, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Wandb(View):
    """View that logs to W&B: in the mode of WANDB_MODE if set, else online if an API key is known, else offline.

    Its files are in the run directory `folder`. The x axis of charts is the metric `step`, or `evaluation/version` for
    evaluations and pictures. W&B's own step is not used, because an evaluation may end after later training steps. A
    resumed run keeps the W&B id of its first attempt (file `wandb/run_id`).
    """

    def __init__(self, config: MonitorConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._aliases = ALIASES[config.metric_aliases]
        key = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if key else "offline")
        self._run: Any = wandb.init(
            project=config.wandb_project, entity=config.wandb_entity, tags=config.wandb_tags or None, name=name,
            id=run_id(folder / "wandb"), resume=None if mode == "offline" else "allow", mode=mode,
            dir=str(folder), reinit="create_new",
            config={**settings, "versions": versions()}, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation/*", step_metric=VERSION_KEY)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**scalars(metrics, self._aliases), "step": step})

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({f"evaluation/{name}": value for name, value in metrics.items()} | {VERSION_KEY: version})

    def image(self, path: Path, version: int) -> None:
        self._run.log({"evaluation/images": self._wandb.Image(str(path)), VERSION_KEY: version})

    def samples(
        self, version: int, prompts: Sequence[Prompt], images: Sequence[ByteArray], scores: Sequence[Scores]
    ) -> None:
        edits = any(prompt.images for prompt in prompts)
        names, rows, pictures = sorted({name for group in scores for name in group.by_term}), [], []
        per_prompt = max(1, MAX_SAMPLES // len(scores))
        for prompt, of_prompt, group in list(zip(prompts, images, scores, strict=True))[:MAX_SAMPLES]:
            source = [self._source(prompt)] if edits else []
            for image, reward, place in zip(contact_sheets(of_prompt[:per_prompt]), group.total, itertools.count()):
                terms = [group.by_term[name][place] if name in group.by_term else None for name in names]
                pictures.append(self._wandb.Image(image, caption=f"{prompt.text} | reward {reward:.4g}"))
                rows.append([version, prompt.text, *source, self._wandb.Image(image), reward, *terms])
        columns = ["version", "prompt", *(["source"] if edits else []), "image", "reward", *names]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"evaluation/samples": pictures, "evaluation/table": table, VERSION_KEY: version})

    def _source(self, prompt: Prompt) -> Any:
        """Returns the first image that a prompt edits, reduced; None without any."""
        if not prompt.images:
            return None
        picture = opened(prompt.images[0])
        picture.thumbnail((MAX_SOURCE_SIDE, MAX_SOURCE_SIDE))
        return self._wandb.Image(picture)

    def close(self) -> None:
        self._run.finish()


def run_id(folder: Path) -> str:
    file = folder / "run_id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def versions() -> dict[str, str]:
    return {package: installed.version for package in PACKAGES for installed in distributions(name=package)}


class Monitor:
    """Passes steps, evaluations and pictures on to each view that is switched on.

    A view that raises an exception is switched off, with a warning and an entry in `failures`; the run goes on. The
    methods may be called from several threads.
    """

    def __init__(
        self,
        config: MonitorConfig,
        folder: Path,
        *,
        name: str,
        settings: Mapping[str, Any],
        display: View | None = None,
    ) -> None:
        """`folder` is the run directory, `settings` the resolved configuration, `display` the console's view."""
        self.failures: list[str] = []
        self._turn = threading.Lock()
        self._views: list[View] = [] if display is None else [display]
        if config.tensorboard:
            self._views.append(Tensorboard(folder / "tensorboard", ALIASES[config.metric_aliases]))
        if config.wandb:
            self._views.append(Wandb(config, name, folder, settings))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._show(lambda view: view.log(step, metrics))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """`metrics` are under the names of metrics.jsonl without the prefix `evaluation/`."""
        self._show(lambda view: view.evaluation(version, metrics))

    def image(self, path: Path, version: int) -> None:
        self._show(lambda view: view.image(path, version))

    def samples(
        self, version: int, prompts: Sequence[Prompt], images: Sequence[ByteArray], scores: Sequence[Scores]
    ) -> None:
        """`images[i]` is uint8 [n, H, W, 3] of prompt i, and `scores[i]` its scores; views show the first of each."""
        self._show(lambda view: view.samples(version, prompts, images, scores))

    def close(self) -> None:
        self._show(lambda view: view.close())
        self._views.clear()

    def _show(self, work: Callable[[View], None]) -> None:
        with self._turn:
            for view in list(self._views):
                try:
                    work(view)
                except Exception as error:  # a view must not end the run, e.g. when the network fails
                    self._views.remove(view)
                    name = type(view).__name__.lower()
                    self.failures.append(f"monitor {name}: {type(error).__name__}: {error}")
                    logger.warning("the monitor %s is switched off: %s: %s", name, type(error).__name__, error)
