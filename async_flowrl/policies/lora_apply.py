"""Loading of a LoRA file of any supported format (diffusers, PEFT, kohya, ComfyUI) into a diffusers pipeline.

diffusers itself ignores tensors that it does not recognise, at most with a log line; here that is an error.
"""

import logging
import re
import tempfile
from pathlib import Path
from typing import Any

from async_flowrl.config.messages import first_line
from async_flowrl.config.quiet import quieter
from async_flowrl.policies import lora_file

_NAMED = re.compile(r"transformer\.(?P<module>.+)\.(lora_A|lora_B|lora\.down|lora\.up|lora_down|lora_up)\.weight")


def apply_lora(pipeline: Any, path: Path) -> None:
    """Loads the LoRA at `path`, a file or folder, into the pipeline with `load_lora_weights`.

    A PEFT folder is converted first, because diffusers would load nothing from it. Raises ValueError, one sentence, if
    the file cannot be read, and if the model lacks a layer that the LoRA adapts.
    """
    file = weights_file(path)
    if file.name == lora_file.PEFT_WEIGHTS and (file.parent / lora_file.PEFT_CONFIG).is_file():
        source = lora_file.read(file)
        with tempfile.TemporaryDirectory() as work:
            _load(pipeline, lora_file.write(Path(work), source.tensors, alpha=source.alpha), path)
    else:
        _load(pipeline, file, path)


def weights_file(path: Path) -> Path:
    """Returns the .safetensors file of a LoRA's path. Raises ValueError for no file, several, or a pickled one."""
    if not path.exists():
        raise ValueError(f"LoRA {path} does not exist")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"LoRA {path} is not a .safetensors file; pickled weights are not read")
        lora_file.header_of(path)
        return path
    for name in (lora_file.FILE_NAME, lora_file.PEFT_WEIGHTS):
        if (path / name).is_file():
            return weights_file(path / name)
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        held = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ValueError(f"LoRA {path} holds {held}; give the file itself, or a folder with {lora_file.FILE_NAME}")
    return weights_file(files[0])


def _load(pipeline: Any, file: Path, where: Path) -> None:
    """Loads the LoRA file and checks that the pipeline uses all of it; `where` is the path for messages.

    Raises ValueError if diffusers cannot load it, if it belongs to another pipeline, or if a layer is missing.
    """
    from async_flowrl.policies.loading import quiet

    options = {"weight_name": file.name, "use_safetensors": True}
    title = type(pipeline).__name__
    try:
        # The checks below replace diffusers' log lines about unknown names.
        with quiet(), quieter("diffusers.loaders", logging.CRITICAL):
            converted: Any = pipeline.lora_state_dict(str(file.parent), **options)
            pipeline.load_lora_weights(str(file.parent), **options)
    except (ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"LoRA {where} cannot be loaded into {title}: {_reason(error)}") from error
    if not pipeline.get_list_adapters():
        first = min(converted, default="none at all")
        raise ValueError(f"LoRA {where}: none of its tensors belong to {title}; their names are such as {first}")
    wanted = {match["module"] for name in converted if (match := _NAMED.fullmatch(name))}
    there = {name.removesuffix(".lora_A") for name, _ in pipeline.transformer.named_modules()}
    if missing := sorted(wanted - there):
        raise ValueError(
            f"LoRA {where} adapts {len(missing)} of {len(wanted)} layers that {title} does not have, e.g. {missing[0]}"
        )


def _reason(error: BaseException) -> str:
    """Returns an error's message in one line; torch names the first mismatch only in the second line."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return " ".join(lines) if lines and lines[0].endswith(":") else first_line(error)
