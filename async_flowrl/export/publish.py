"""Files of `python -m async_flowrl.export`: the weights in the formats asked for, and the model card."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.export.card import read_results, write_card
from async_flowrl.export.source import PEFT, Source, family_of, read_source, write_lora
from async_flowrl.export.whole_model import MERGED, TRANSFORMER, write_merged, write_whole
from async_flowrl.policies import lora_file, lora_formats


def publish(given: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Writes the folder that the arguments ask for; returns the paths it wrote, and a sentence on each format refused.

    Raises ValueError with one sentence. Arguments are checked before anything is written, as far as possible.
    """
    out: Path = given.out.expanduser()
    source = read_source(given.source.expanduser(), average=not given.raw, base=given.base)
    if source.config is not None and source.config.model.weights == "random":
        raise ValueError("SOURCE is of a run with model.weights=random, and what that has learned fits no model")
    evaluation = given.evaluation.expanduser() if given.evaluation else None
    if evaluation is not None:
        read_results(evaluation)
    _check_out(out, source)
    if source.whole is not None:
        written, files = _write_whole(given, source, out)
        refused: list[str] = []
    else:
        forms, refused = _offered(given.form or (), source)
        written, files = _write_lora(given, source, out, forms)
    return [*written, write_card(out, source, files, licence=given.license, evaluation=evaluation)], refused


def _check_out(out: Path, source: Source) -> None:
    """Raises ValueError if `out` holds an export of other weights, whose files would stay beside the new ones."""
    if out.exists() and (not out.is_dir() or (out / "config.yaml").is_file()):
        raise ValueError(
            f"{out} is {'the folder of a run' if out.is_dir() else 'a file'}: give a folder for the export"
        )
    there = sorted(path.name for path in out.glob("*.safetensors"))
    there += [name for name in (PEFT, MERGED, TRANSFORMER) if (out / name).exists()]
    if source.whole is None and lora_file.FILE_NAME in there:
        with tempfile.TemporaryDirectory() as again:
            if write_lora(source, Path(again)).read_bytes() == (out / lora_file.FILE_NAME).read_bytes():
                return
    if there:
        raise ValueError(f"{out} holds an export of other weights ({', '.join(there)}): remove it or export elsewhere")


def _offered(forms: Sequence[str], source: Source) -> tuple[list[str], list[str]]:
    """Returns those of the formats that the LoRA can have, and a sentence on each of the others."""
    family, offered, refused = family_of(source) if forms else "", [], []
    for form in forms:
        try:
            lora_formats.converter(form, family)(source.lora)
            offered.append(form)
        except ValueError as error:
            refused.append(str(error))
    return offered, refused


def _write_lora(
    given: argparse.Namespace, source: Source, out: Path, forms: Sequence[str]
) -> tuple[list[Path], dict[str, str]]:
    """Returns the written paths, and a description of each further file by its name."""
    family = family_of(source) if forms or given.merged else None
    base = source.model.path if source.model is not None else None
    written, files = [], {}
    if given.merged and source.model is not None:
        written.append(write_merged(source.model, source.lora, out, given.merged))
        files[MERGED] = f"the whole {given.merged} with the LoRA in its weights, for `from_pretrained`"
    written += [write_lora(source, out), out / PEFT]
    for form in forms:
        path = out / f"{form}.safetensors"
        written.append(lora_formats.write(path, source.lora, family=str(family), form=form, base=base))
        files[path.name] = {"comfyui": "ComfyUI", "kohya": "programs that read kohya's names"}[form]
    return written, files


def _write_whole(given: argparse.Namespace, source: Source, out: Path) -> tuple[list[Path], dict[str, str]]:
    """The same of a run with tune=full: the folder is the pipeline itself, or holds its transformer alone."""
    if given.form:
        raise ValueError(f"--format {given.form[0]} is for a LoRA, and SOURCE is of a run with tune=full")
    written = write_whole(source, out, given.merged or "pipeline")
    return [written], {written.name: "the trained weights"}
