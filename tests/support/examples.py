"""The commands in the READMEs of examples/, in blocks marked `<!-- cpu -->`, `<!-- cpu, slow -->` or `<!-- gpu -->`."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:<!-- (cpu|cpu, slow|gpu) -->\n)?```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = (
    "runtime.backend=local",
    "total_steps=2",
    "model.tiny.layers=1",
    "group_size=4",
    "trainer.micro_batch_size=4",
    "rollout.num_inference_steps=4",
    "evaluate.images_per_prompt=2",
    "evaluate.every=0",
    "evaluate.before_training=false",
    "save.every=0",
)
"""Overrides that make any training short on a CPU."""


@dataclass(frozen=True)
class Block:
    """One block of commands; `mark` is empty if the README has none."""

    folder: str
    number: int
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.folder}-{self.number}"


@dataclass(frozen=True)
class Command:
    """One command line: its words, without the `NAME=value` before them, which are in `environment`."""

    environment: dict[str, str]
    words: tuple[str, ...]


def blocks() -> list[Block]:
    """Returns the blocks of all READMEs, in order."""
    readmes = sorted((ROOT / "examples").glob("*/README.md"))
    return [
        Block(readme.parent.name, number, mark, text)
        for readme in readmes
        for number, (mark, text) in enumerate(BLOCK.findall(readme.read_text(encoding="utf-8")))
    ]


def commands(text: str) -> list[Command]:
    """Returns the commands of a block. Lines that end with a backslash are joined; loops and `&` are not understood."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        environment = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if words:
            found.append(Command(environment, tuple(words)))
    return found
