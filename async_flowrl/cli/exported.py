"""Files of `async-flowrl export`: the weights in the formats asked for, and the model card."""

import argparse
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from async_flowrl.cli.export_source import PEFT, Source, family_of, read_source, write_lora
from async_flowrl.cli.model_card import read_results, write_card
from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies import lora_formats, trained_file
from async_flowrl.policies.lora_file import LoraFile, modules_of
from async_flowrl.policies.registry import folder_of, resolve_model
from async_flowrl.policies.stored import StoredWeights, network_folders, prefixes


def publish(options: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Writes the folder; returns the paths, and a sentence on each format refused. Raises ValueError."""
    out: Path = options.out.expanduser()
    source = read_source(options.source.expanduser(), average=not options.raw, base=options.base)
    if source.config is not None and source.config.model.weights == "random":
        raise ValueError("SOURCE is of a run with model.weights=random, and what that has learned fits no model")
    evaluation = options.evaluation.expanduser() if options.evaluation else None
    if evaluation is not None:
        read_results(evaluation)
    _check_out(out, source)
    if source.whole is not None:
        if options.form:
            raise ValueError(f"--format {options.form[0]} is for a LoRA, and SOURCE is of a run with tune=full")
        what = options.merged or "pipeline"
        transformer = write_whole(source, out, what)
        written, refused = [out if what == "pipeline" else transformer], list[str]()
        files = {transformer.name: "the trained weights"}
    else:
        forms, refused = _offered(options.form or (), source)
        written, files = _write_lora(options, source, out, forms)
    return [*written, write_card(out, source, files, licence=options.license, evaluation=evaluation)], refused


def _check_out(out: Path, source: Source) -> None:
    if out.exists() and (not out.is_dir() or (out / "config.yaml").is_file()):
        raise ValueError(
            f"{out} is {'the folder of a run' if out.is_dir() else 'a file'}: give a folder for the export"
        )
    existing = sorted(path.name for path in out.glob("*.safetensors"))
    existing += [name for name in (PEFT, MERGED, TRANSFORMER) if (out / name).exists()]
    if source.whole is None and existing:
        with tempfile.TemporaryDirectory() as again:
            written = write_lora(source, Path(again))
            before = out / written.relative_to(again)
            if before.is_file() and written.read_bytes() == before.read_bytes():
                return
    if existing:
        raise ValueError(f"{out} holds other weights' {', '.join(existing)}: remove it or export elsewhere")


def _offered(forms: Sequence[str], source: Source) -> tuple[list[str], list[str]]:
    family, offered, refused = family_of(source) if forms else "", [], []
    for form in forms:
        try:
            lora_formats.converter(form, family)(source.lora)
            offered.append(form)
        except ValueError as error:
            refused.append(str(error))
    return offered, refused


def _write_lora(
    options: argparse.Namespace, source: Source, out: Path, forms: Sequence[str]
) -> tuple[list[Path], dict[str, str]]:
    family = family_of(source) if forms or options.merged else None
    base = source.model.path if source.model is not None else None
    written, files = [], {}
    if options.merged and source.model is not None:
        written.append(write_merged(source.model, source.lora, out, options.merged))
        files[MERGED] = f"the whole {options.merged} with the LoRA in its weights, for `from_pretrained`"
    written += [write_lora(source, out), out / PEFT]
    for form in forms:
        path = out / f"{form}.safetensors"
        written.append(lora_formats.write(path, source.lora, family=str(family), form=form, base=base))
        files[path.name] = {"comfyui": "ComfyUI", "kohya": "programs that read kohya's names"}[form]
    return written, files


MERGED, TRANSFORMER = "merged", "transformer"  # Folder that is written, and the folder of the transformer inside it.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = ("*.bin", "*.pt", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", ".cache", ".git*")


def write_merged(model: ModelConfig, lora: LoraFile, out: Path, what: str) -> Path:
    """Writes the folder `out`/merged and returns it; after an error no part of it remains. Raises ValueError."""
    target, work = out / MERGED, out / f".{MERGED}-unfinished"
    base = folder_of(resolve_model(model), "all" if what == "pipeline" else TRANSFORMER)
    networks = network_folders(str(base))
    copied = {base: work} if what == "pipeline" else {base / folder: work / folder for folder in networks}
    _check_room(target, (file for folder in copied for file in folder.rglob("*")))
    shutil.rmtree(work, ignore_errors=True)
    try:
        for folder, copy in copied.items():
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*IGNORED), copy_function=shutil.copyfile)
        left = set(modules_of(lora.tensors))
        for file in set(StoredWeights(str(base), dtype=torch.float32, folders=networks).sources.values()):
            left -= _merge(file, work / file.parent.name / file.name, lora, prefixes(networks)[file.parent.name])
        if left:
            raise ValueError(f"the LoRA does not fit {model.path}: no weight of its layer {min(left)} is in the files")
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _check_room(target: Path, copied: Iterable[Path]) -> None:
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or export elsewhere")
    needed = sum(file.stat().st_size for file in copied if file.is_file())
    target.parent.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(target.parent).free):
        raise ValueError(f"{target} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free there")


def _merge(file: Path, target: Path, lora: LoraFile, prefix: str) -> set[str]:
    # Returns the layers whose weights are in the file, where their names have no `prefix`. Each matrix is summed in
    # float32, then rounded once.
    with safe_open(file, framework="pt") as opened:
        names = {prefix + name: name for name in opened.keys()}  # noqa: SIM118
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(stored) for name, stored in names.items()}
    here = {module for module in modules_of(lora.tensors) if f"{module}.weight" in tensors}
    for module in here:
        name = f"{module}.weight"
        if tensors[name].dtype not in _DTYPES:
            raise ValueError(f"--merged adds to float32, bfloat16 and float16 weights, {name} is {tensors[name].dtype}")
        a, b = (lora.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        if tensors[name].shape != (b.shape[0], a.shape[1]):
            raise ValueError(f"the LoRA's layer {module} is for a matrix of {b.shape[0]} × {a.shape[1]}")
        tensors[name] = (tensors[name].float() + (b @ a) * (lora.alpha / lora.rank)).to(tensors[name].dtype)
    save_file({stored: tensors[name] for name, stored in names.items()}, target, metadata=metadata)
    return here


def write_whole(source: Source, out: Path, what: str) -> Path:
    """Writes `out`/transformer (returned), and all of what="pipeline". Raises ValueError."""
    if source.model is None or source.whole is None:
        raise ValueError("--base is needed: SOURCE does not say which model it is for")
    target = out / TRANSFORMER
    model = resolve_model(source.model)
    base = folder_of(model, "all" if what == "pipeline" else TRANSFORMER)
    networks = [base / folder for folder in network_folders(str(base))]
    copied = [item for item in base.iterdir() if item not in networks] if what == "pipeline" else []
    _check_room(target, (file for item in (*networks, *copied) for file in (item, *item.rglob("*"))))
    ignore = shutil.ignore_patterns(*IGNORED)
    for item in copied:
        if item.is_dir() and item.name not in ignore(str(base), [item.name]):
            shutil.copytree(item, out / item.name, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)
        elif item.is_file() and item.suffix == ".json":
            shutil.copyfile(item, out / item.name)
    return trained_file.save_whole(target, source.whole, model)
