"""Model card of what is exported: README.md with the Hub's front matter, written from the run's own records."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from async_flowrl.cli.before_after import GRID, HEAD, RESULTS, score_rows
from async_flowrl.cli.export_source import PEFT, Source
from async_flowrl.cli.generate import arguments_of, in_diffusers, sampling_of, usual
from async_flowrl.config.compose import record_of, typed_command
from async_flowrl.config.paths import sha256_of
from async_flowrl.config.resolution import configured, frames_of, in_pixels
from async_flowrl.config.schema import RewardTerm
from async_flowrl.observability.evaluations import (
    Evaluation,
    between,
    first_with_setting,
    policy_versions,
    read_evaluations,
)
from async_flowrl.observability.events import read_events
from async_flowrl.observability.images import SOURCES
from async_flowrl.observability.metrics import Metrics
from async_flowrl.policies import lora_file
from async_flowrl.policies.registry import load_family, resolve_model
from async_flowrl.policies.stored import EXPERTS
from async_flowrl.policies.stored import FOLDER as WHOLE
from separation.text_table import markdown_table

logger = logging.getLogger(__name__)

README, NEW_README, CURVE = "README.md", "README.new.md", "curve.png"
_GAP = 16  # Pixels between the images before and after.
TAGS = ("reinforcement-learning", "async_flowrl")


def write_card(
    out: Path, source: Source, files: Mapping[str, str], *, licence: str | None = None, evaluation: Path | None = None
) -> Path:
    """Writes README.md and its pictures into `out`; `files` maps further files of the folder to descriptions.

    `evaluation` is a folder of `async-flowrl evaluate`, in place of the run's evaluations; ValueError if it is none.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = lora_file.hub_name(source.model.path) if source.model is not None else None
    videos = source.config is not None and frames_of(configured(source.config.rollout)[0]) is not None
    task = f"{'image' if _edits(source) else 'text'}-to-{'video' if videos else 'image'}"
    front = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "finetune" if source.whole is not None else "adapter",
        license=licence or "unknown",
        library_name="diffusers",
        pipeline_tag=task,
        tags=[*([] if source.whole is not None else ["lora"]), "diffusers", task, *TAGS],
    )
    title = out.resolve().name
    if source.config is not None:
        title = f"{Path(source.config.model.path).name} trained on {', '.join(source.config.reward.terms)}"
    parts = [f"# {title}", _origin(source, base)]
    parts += [*_training(source), *_results(out, source, evaluation), _usage(source, base), _files(out, files)]
    chosen = licence or "Not chosen yet: replace `license: unknown` above"
    ending = f"## Licence\n\n{chosen}. The licence of {base or 'the base model'} applies as well."
    parts += [*_reproduction(source), ending]
    text = str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))
    path = out / README
    if path.exists() and not _ours(path):
        path = out / NEW_README
        logger.warning("%s is kept, as it is not a card that an export wrote; the new card is %s", out / README, path)
    path.write_text(text + _stamp(text), encoding="utf-8")
    return path


def _stamp(text: str) -> str:
    return f"\n<!-- async_flowrl {hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def _ours(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    body = text.rpartition("\n<!-- async_flowrl ")[0]
    return text == body + _stamp(body)


def _origin(source: Source, base: str | None) -> str:
    model = base or (f"`{Path(source.model.path).name}`" if source.model else "a base model that is not recorded")
    if source.whole is not None:
        what = f"The transformer of {model}, trained"
    else:
        lora = source.lora
        what = f"A LoRA (rank {lora.rank}, alpha {lora.alpha:g}, {len(lora.tensors) // 2} layers) for {model}, trained"
    if source.config is None:
        return f"{what.removesuffix(', trained')}. The file does not say how it was trained."
    step = f" after step {source.step}" if source.step is not None else ""
    part = ", the moving average of its weights" if source.part == "ema" else ""
    return f"{what} by reinforcement learning with async_flowrl. These are the weights{step}{part}."


def _training(source: Source) -> list[str]:
    if source.config is None:
        return []
    config = source.config
    held_out, evaluated = config.evaluate.reward.terms, config.data.evaluation
    sizes = ", ".join(in_pixels(size) for size in configured(config.rollout))
    rows = [
        ("algorithm", f"`{config.algorithm.name}`"),
        ("trained reward", _terms(config.reward.terms)),
        *([("held-out scores, not trained", _terms(held_out))] if held_out else []),
        ("training prompts", f"`{Path(config.data.train).name}`"),
        ("evaluation prompts", "from the training file" if evaluated is None else f"`{Path(evaluated).name}`"),
        ("steps", f"{source.step if source.step is not None else config.total_steps} of {config.total_steps}"),
        ("images per step", f"{config.prompts_per_step} prompts × {config.group_size}"),
        ("base in training", f"quantised to {config.model.quantize}" if config.model.quantize else "as in its files"),
        ("learning rate", f"{config.trainer.learning_rate:g}"),
        ("max_staleness", str(config.max_staleness)),
        ("resolution and denoising steps", f"{sizes}, {config.rollout.num_inference_steps}"),
        ("seed", str(config.seed)),
    ]
    return ["## Training\n\n" + markdown_table(("setting", "value"), rows)]


def _terms(terms: Mapping[str, RewardTerm]) -> str:
    return ", ".join(f"{term.weight:g} × `{name}`" for name, term in terms.items())


def _results(out: Path, source: Source, evaluation: Path | None) -> list[str]:
    parts = []
    records = read_evaluations(source.run / "evaluations.jsonl") if source.run is not None else []
    _draw_grid(out, source)
    if evaluation is not None:
        parts.append("## Results\n\n" + _measured(evaluation, out))
    elif (recorded := _recorded(source, records)) is not None:
        parts.append("## Results\n\n" + recorded)
    if source.run is not None and (metrics := source.run / "metrics.jsonl").is_file():
        upto = [e for e in records if source.step is None or e.version <= source.step]
        lines = [line for line in read_events(metrics) if source.step is None or line["step"] < source.step]
        if write_curve(out / CURVE, lines, upto):
            parts.append(f"![reward by training step]({CURVE})")
    if (out / GRID).is_file():
        parts.append(f"![images before and after training, with their scores]({GRID})")
    return parts


def read_results(folder: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        score_rows(results["rewards"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"--evaluation {folder} is no folder of async-flowrl evaluate ({why})") from error
    return results


def _measured(folder: Path, out: Path) -> str:
    results = read_results(folder)
    if (folder / GRID).is_file():
        (out / GRID).write_bytes((folder / GRID).read_bytes())
    how = (
        f"{results['scored']} prompts × {results['images_per_prompt']} images, the same initial noises before and after"
    )
    return f"{markdown_table(HEAD, score_rows(results['rewards']))}\n\n{how}."


def _recorded(source: Source, records: Sequence[Evaluation]) -> str | None:
    now = next((e for e in records if not e.baseline and e.version == source.step), None)
    before = first_with_setting(records, now) if now is not None else None
    if now is None or before is None:
        return None
    rows = []
    for name, curve in now.curves.items():
        moved, first = between(name, now, before), before.curves.get(name)
        if moved is not None and first is not None:
            error = "" if moved.half is None else f" ± {moved.half:.2g}"
            means = f"{first.estimate.mean:.4g}", f"{curve.estimate.mean:.4g}"
            rows.append((f"`{name}`", curve.kind.replace("_", " "), *means, f"{moved.mean:+.4g}{error}"))
    note = "From the run's own evaluations: paired by prompt and noise, ± half of the 95 % interval over prompts."
    head = ("score", "kind", f"version {before.version}", f"version {now.version}", "difference")
    return markdown_table(head, rows) + f"\n\n{note}"


def _draw_grid(out: Path, source: Source) -> None:
    if source.run is None or not source.step:
        return
    before, after = (source.run / "images" / f"step_{version:06d}.png" for version in (0, source.step))
    if not before.is_file() or not after.is_file():
        return
    with Image.open(before) as left, Image.open(after) as right:
        sheet = Image.new("RGB", (left.width + _GAP + right.width, max(left.height, right.height)), "white")
        sheet.paste(left.convert("RGB"), (0, 0))
        sheet.paste(right.convert("RGB"), (left.width + _GAP, 0))
    sheet.save(out / GRID, format="PNG", optimize=True)


def _edits(source: Source) -> bool:
    """Returns True for a family that needs images, and for a run whose prompts had some."""
    family = None
    with suppress(ValueError, OSError):  # a model that is not here
        family = load_family(resolve_model(source.model).family) if source.model is not None else None
    needed = family is not None and family.policy.images[0] > 0
    return needed or (source.run is not None and (source.run / "images" / SOURCES).is_dir())


def _call(source: Source) -> str:
    import diffusers

    arguments: dict[str, Any] = {}
    with suppress(ValueError, OSError, AttributeError):  # a model that is not here, or whose pipeline is not diffusers'
        if source.model is not None:
            family = load_family(resolve_model(source.model).family)
            config = source.config or usual(source.model.path)
            pipeline = getattr(diffusers, getattr(family, "pipeline", ""))
            arguments = arguments_of(pipeline, config.model, sampling_of(config), family)
    return f"{'video' if 'num_frames' in arguments else 'image'} = {in_diffusers(arguments, edits=_edits(source))}"


def _usage(source: Source, base: str | None) -> str:
    name, dtype = base or "BASE_MODEL", "torch_dtype=torch.bfloat16"
    with suppress(ValueError, OSError):  # a model that is not here
        if source.model is not None:
            dtype = f"torch_dtype=torch.{resolve_model(source.model).dtype}"
    tensors = source.whole if source.whole is not None else source.lora.tensors
    two = any(tensor.startswith(f"{EXPERTS[1]}.") for tensor in tensors)
    options = [f'weight_name="{lora_file.FILE_NAME}"']
    if two:
        options = [f'subfolder="{each}", {options[0]}' for each in EXPERTS]
        options[1] += f", load_into_{EXPERTS[1]}=True"
    calls = [f'pipe.load_lora_weights("THIS_FOLDER_OR_REPOSITORY", {each})' for each in options]
    load = "\n".join([f'pipe = DiffusionPipeline.from_pretrained("{name}", {dtype})', *calls])
    networks = {each: f"{PEFT}/{each}" for each in EXPERTS} if two else {WHOLE: PEFT}
    wrapped = [f'`PeftModel.from_pretrained(pipe.{each}, "THIS_FOLDER/{at}")`' for each, at in networks.items()]
    note = f"For PEFT: {' and '.join(wrapped)}."
    if source.whole is not None:
        load = "\n".join(
            f'{each} = AutoModel.from_pretrained("THIS_FOLDER_OR_REPOSITORY", subfolder="{each}", {dtype})'
            for each in networks
        )
        parts = ", ".join(f"{each}={each}" for each in networks)
        load += f'\npipe = DiffusionPipeline.from_pretrained("{name}", {parts}, {dtype})'
        note = "Where the pipeline's other parts lie beside it, that folder is a pipeline of its own."
    return f"""## Use

```python
import torch
from diffusers import AutoModel, DiffusionPipeline

{load}
{_call(source)}
```

{note}"""


def _files(out: Path, files: Mapping[str, str]) -> str:
    kinds = {lora_file.FILE_NAME: "diffusers", f"{PEFT}/{lora_file.PEFT_WEIGHTS}": "PEFT", **files}
    kinds |= {f"{expert}/{lora_file.FILE_NAME}": "diffusers" for expert in EXPERTS}
    kinds |= {f"{PEFT}/{expert}/{lora_file.PEFT_WEIGHTS}": "PEFT" for expert in EXPERTS}
    rows = [(f"`{name}`", what, f"`{sha256_of(out / name)}`") for name, what in kinds.items() if (out / name).is_file()]
    rows += [(f"`{name}/`", what, "") for name, what in kinds.items() if (out / name).is_dir()]
    return "## Files\n\n" + markdown_table(("file", "for", "SHA-256"), rows)


def _reproduction(source: Source) -> list[str]:
    run = source.run
    if run is None:
        return []
    command = typed_command(record_of(run), without=("--config-dir", "output_dir", "resume")) or "async-flowrl train"
    lines = ["## Reproduce", "", "```", command, "async-flowrl verify RUN", "```"]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8")) if (run / "summary.json").is_file() else {}
    if digest := summary.get("weights_digest"):
        lines += ["", f"The run ended with the weights digest `{digest}`, which the same seed and settings give again."]
    return ["\n".join(lines)]


def write_curve(path: Path, metrics: Sequence[Metrics], evaluations: Sequence[Evaluation]) -> bool:
    """Draws the training reward by step and the evaluations with 95 % intervals; returns False if there is neither."""
    from matplotlib.figure import Figure

    trained = [(line["step"], line["reward/mean"]) for line in metrics if line.get("reward/mean") is not None]
    policy = policy_versions(evaluations)
    scored = [(record.version, record.curves["reward"].estimate) for record in policy if "reward" in record.curves]
    if not trained and not scored:
        return False
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#8aa9cf", linewidth=1, label="training images")
    if scored:
        steps, means = [step for step, _ in scored], [mean.mean for _, mean in scored]
        axes.plot(steps, means, color="#d9822b", marker="o", label="evaluations, with 95 % intervals")
        bounds = [(f.mean, f.mean) if f.low is None or f.high is None else (f.low, f.high) for _, f in scored]
        low, high = zip(*bounds, strict=True)
        axes.fill_between(steps, low, high, color="#d9822b", alpha=0.2, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return True
