"""Command line of `python -m async_flowrl.export`."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config import exit_codes
from async_flowrl.export.arguments import WHAT, parser
from async_flowrl.export.card import Extras, draw_grid, read_results, write_card
from async_flowrl.export.merged import MERGED, write_merged
from async_flowrl.export.source import PEFT, Source, family_of, read_source, write_lora
from async_flowrl.export.whole import write_whole
from async_flowrl.policies import lora_formats

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exports and logs the written paths; returns exit code 0, or 2 for wrong arguments and files."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for written in publish(given):
            logger.info("wrote %s", written)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return exit_codes.CONFIG
    return exit_codes.OK


def publish(given: argparse.Namespace) -> list[Path]:
    """Writes the folder that the arguments ask for; returns the paths it wrote.

    Raises ValueError with one sentence. Arguments are checked before anything is written, as far as possible.
    """
    out: Path = given.out.expanduser()
    source = read_source(given.source.expanduser(), average=not given.raw, base=given.base)
    if source.whole is not None:
        return _publish_whole(given, source, out)
    family = family_of(source) if given.form or given.merged else None
    for form in given.form or ():
        lora_formats.converter(form, str(family))(source.lora)
    if given.merged and source.model is None:
        raise ValueError("--merged needs the base model: name it with --base")
    evaluation = given.evaluation.expanduser() if given.evaluation else None
    if evaluation is not None:
        read_results(evaluation)
    base = source.model.path if source.model is not None else None
    written, files = [], {}
    if given.merged and source.model is not None:
        written.append(write_merged(source.model, source.lora, out, given.merged))
        files[MERGED] = f"the whole {given.merged} with the LoRA in its weights, for `from_pretrained`"
    written += [write_lora(source, out), out / PEFT]
    for form in given.form or ():
        path = out / f"{form}.safetensors"
        written.append(lora_formats.write(path, source.lora, family=str(family), form=form, base=base))
        files[path.name] = {"comfyui": "ComfyUI", "kohya": "programs that read kohya's names"}[form]
    draw_grid(out, source)
    extras = Extras(files, given.license, evaluation)
    return [*written, write_card(out, source, extras)]


def _publish_whole(given: argparse.Namespace, source: Source, out: Path) -> list[Path]:
    """The same of a run with tune=full: the folder is the pipeline itself, or holds its transformer alone."""
    if given.form:
        raise ValueError(f"--format {given.form[0]} is for a LoRA, and SOURCE is of a run with tune=full")
    evaluation = given.evaluation.expanduser() if given.evaluation else None
    if evaluation is not None:
        read_results(evaluation)
    written = write_whole(source, out, given.merged or WHAT[0])
    draw_grid(out, source)
    return [written, write_card(out, source, Extras({written.name: "the trained weights"}, given.license, evaluation))]
