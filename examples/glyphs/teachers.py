"""Two teachers, one student: a LoRA that writes legibly and one that writes with contrast are merged by distillation.

python -m examples.glyphs.teachers --seed 1

Words are asked for in two ways, and each has its teacher: `the word "CAT"` (trained on OCR) and `the word "CAT", in
black on white` (trained on contrast). The student gets no reward: on its own images, it learns where the teacher of the
prompt would have gone (docs/algorithms.md, "Teachers"). All scores are of held-out words, which no training has seen.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from async_flowrl.types import ByteArray
from examples.glyphs.audit import contrast, open_model
from examples.glyphs.compare import COPIES, ROOT
from examples.glyphs.flow import STEPS, generate, legibility
from examples.glyphs.words import TEST, TRAIN, prompt

FORMS = {"ocr": "{}", "look": "{}, in black on white"}
"""Label of a teacher to how its prompts are written; {} is the prompt of the other glyphs examples."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of all three runs")
    parser.add_argument("--runs", type=Path, default=Path("outputs/glyphs_teachers"), help="run directories")
    arguments = parser.parse_args()
    folder = arguments.runs.resolve() / f"seed{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    train(folder, "ocr", arguments.seed, ("ocr",))
    train(folder, "look", arguments.seed, ("look",), "reward=contrast", steps=60)
    taught = ",".join(f"{label}: {folder / label / 'lora'}" for label in FORMS)
    alone = ("algorithm.teacher_coef=1", "algorithm.policy_coef=0")
    train(folder, "student", arguments.seed, tuple(FORMS), f"algorithm.teachers={{{taught}}}", *alone)
    print("| | OCR of `the word …` | contrast of `the word …, in black on white` |\n|---|---|---|")
    for name in ("base", "ocr", "look", "student"):
        written, drawn = images(folder / name / "lora" if name != "base" else None)
        print(f"| {name} | {legibility(written, TEST):.3f} | {contrast(drawn):.3f} |", flush=True)


def train(folder: Path, name: str, seed: int, labels: tuple[str, ...], *more: str, steps: int = 240) -> None:
    """Trains one LoRA in `folder / name` on the words in the forms of `labels`, or what is missing of it."""
    summary = folder / name / "summary.json"
    if summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["steps"] == steps:
        return
    rows = [{"prompt": FORMS[label].format(prompt(word)), "teacher": label} for word in TRAIN for label in labels]
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = ("experiment=glyphs", "runtime.backend=local", f"seed={seed}", f"data.train={data}", "evaluate.every=0")
    where = (f"total_steps={steps}", f"output_dir={folder / name}", "resume=auto")
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", "one_step_off", *given, *where, *more]
    subprocess.run(command, cwd=ROOT, check=True)


def images(lora: Path | None) -> list[ByteArray]:
    """Generates uint8 [len(TEST), COPIES, H, W, 3] of the held-out words in each form; without `lora` by the base."""
    pipeline = open_model()
    if lora is not None:
        pipeline.load_lora_weights(lora)
    return [generate(pipeline, TEST, COPIES, steps=STEPS, form=form) for form in FORMS.values()]


if __name__ == "__main__":
    main()
