"""The commands of the examples' READMEs: blocks marked `<!-- cpu -->`, `<!-- cpu, slow -->` or `<!-- gpu -->`."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:<!-- (cpu|cpu, slow|gpu) -->\n)?```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHORT = (
    "runtime.backend=local",
    "total_steps=2",
    "group_size=4",
    "trainer.micro_batch_size=4",
    "evaluate.images_per_prompt=2",
    "evaluate.every=0",
    "evaluate.before_training=false",
    "save.every=0",
)
"""What makes any training on a CPU short."""


@dataclass(frozen=True)
class Block:
    """`mark` is "" where the README forgot it."""

    folder: str
    number: int
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.folder}-{self.number}"


@dataclass(frozen=True)
class Command:
    """`words` without the shell's `NAME=value` before them, which are in `environment`."""

    environment: dict[str, str]
    words: tuple[str, ...]


def blocks() -> list[Block]:
    """Of all READMEs, in order."""
    readmes = sorted((ROOT / "examples").glob("*/README.md"))
    return [
        Block(readme.parent.name, number, mark, text)
        for readme in readmes
        for number, (mark, text) in enumerate(BLOCK.findall(readme.read_text(encoding="utf-8")))
    ]


def commands(text: str) -> list[Command]:
    """The lines of a block, continued ones joined; loops and background jobs are for a shell, not for this."""
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
