"""Tests of rewards with models: their scores equal those of the authors' code for the same weights and images."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from async_flowrl.config.compose import compose_config
from async_flowrl.config.hub import patterns
from async_flowrl.rewards.aesthetic import Aesthetic
from async_flowrl.rewards.clip import ClipDirection, ClipScore, PickScore
from async_flowrl.rewards.hps import HPSv2, HPSv21, clean, prepared, to_transformers
from async_flowrl.rewards.image_statistics import sharpness
from async_flowrl.rewards.registry import check_differentiable
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.types import ByteArray, Prompt
from tests.support.hub import COMMIT, serving
from tests.support.upstream_rewards import inputs
from tests.support.upstream_rewards.make import SEEDS, SIZES

EXPECTED = json.loads((Path(inputs.__file__).with_name("expected.json")).read_text())

ANY = Prompt(0, "whatever")
SCALED_BY_PILLOW = pytest.mark.skipif(int(PIL.__version__.partition(".")[0]) < 13, reason="expected of Pillow 13")
"""Older versions scale images otherwise, for the authors' code as for ours: other scores by up to 1.3 %."""


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in state.items()}


def tokenizer() -> Any:
    entries = {entry: place for place, entry in enumerate(inputs.vocabulary())}
    return CLIPTokenizer(entries, [tuple(merge.split()) for merge in inputs.MERGES], model_max_length=inputs.TOKENS)


def processor(folder: Path, activation: str) -> None:
    """Architecture, tokenizer and preparation of images, as a hub's repository has them."""
    CLIPConfig(**inputs.clip_config(activation)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    sides = {"size": {"shortest_edge": inputs.SIDE}, "crop_size": {"height": inputs.SIDE, "width": inputs.SIDE}}
    CLIPImageProcessorPil(**sides).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By reward: transformers' files, with weights where the reward reads them from there."""
    made = {}
    for name, seed in SEEDS.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        if name != "hpsv2":
            model = CLIPModel(CLIPConfig(**inputs.clip_config("quick_gelu")))
            model.load_state_dict(to_transformers(tensors(inputs.clip_weights(seed))))
            model.save_pretrained(folder)
        processor(folder, "gelu" if name == "hpsv2" else "quick_gelu")
    for file in ("HPS_v2_compressed.pt", "HPS_v2.1_compressed.pt"):
        torch.save({"epoch": 3, "state_dict": tensors(inputs.clip_weights(SEEDS["hpsv2"]))}, made["hpsv2"] / file)
    torch.save(tensors(inputs.head_weights(SEEDS["aesthetic"])), made["aesthetic"] / "aesthetic-model.pth")
    return made


def cases(name: str) -> Iterator[tuple[ByteArray, Prompt, list[float]]]:
    for name_of_size, size in SIZES.items():
        for place, expected in enumerate(EXPECTED[name]["scores"][name_of_size]):
            yield inputs.images(*size), Prompt(place, inputs.PROMPTS[place]), expected


@pytest.mark.extended
@SCALED_BY_PILLOW
def test_pickscore_is_that_of_its_readme(folders: dict[str, Path]) -> None:
    reward = PickScore(str(folders["pickscore"]), processor=str(folders["pickscore"]), scale=1.0, batch_size=3)
    for images, prompt, expected in cases("pickscore"):
        assert reward(images, prompt) == pytest.approx(expected, rel=1e-5, abs=1e-4)
    trained_on = PickScore(str(folders["pickscore"]), processor=str(folders["pickscore"]))
    assert trained_on(images, prompt) == pytest.approx([x / 26 for x in expected], rel=1e-5, abs=1e-5)


@pytest.mark.extended
@SCALED_BY_PILLOW
def test_clip_score_is_torchmetrics(folders: dict[str, Path]) -> None:
    reward = ClipScore(str(folders["clip_score"]), batch_size=3)
    for images, prompt, expected in cases("clip_score"):
        # torchmetrics cuts its answer off at 0, ours goes on below it.
        scores = reward(images, prompt)
        assert [max(0.0, score) for score in scores] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    divided = ClipScore(str(folders["clip_score"]), scale=30.0, batch_size=3)(images, prompt)
    assert divided == [score / 30 for score in scores]


def test_the_direction_is_the_cosine_of_two_differences(folders: dict[str, Path]) -> None:
    folder = folders["clip_score"]
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    captions = {"original_prompt": "a red fox", "edited_prompt": "a blue fox in snow"}
    prompt, reward = Prompt(0, "make it blue", metadata=captions), ClipDirection(str(folder), batch_size=2)
    scores = reward(images[1:], prompt, [images[0], images[1]])
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=list(captions.values()), images=list(images), padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs)
    direction = out.text_embeds[1] - out.text_embeds[0]
    expected = torch.nn.functional.cosine_similarity(out.image_embeds[1:] - out.image_embeds[0], direction[None])
    assert scores == pytest.approx(expected.tolist(), abs=1e-4) and len(set(scores)) == 3
    for size in (1, 2, 4, 16):
        reward.batch_size = size
        unchanged = reward(np.concatenate([images[[0] * 5], images[1:]]), prompt, [images[0]])
        assert unchanged[:5] == [0.0] * 5 and unchanged[5:] == pytest.approx(scores, abs=1e-4)
    assert not ClipDirection.differentiable
    wrong: list[dict[str, object]] = [
        {},
        {"original_prompt": "a"},
        {**captions, "edited_prompt": 3},
        {**captions, "edited_prompt": "a red fox"},
    ]
    for metadata in wrong:
        with pytest.raises(ValueError, match=r"'make it blue'"):
            reward.check(Prompt(0, "make it blue", metadata=metadata))


@pytest.mark.extended
@pytest.mark.parametrize("kind", [HPSv2, HPSv21])
def test_hpsv2_is_that_of_its_package(kind: type[HPSv2], folders: dict[str, Path]) -> None:
    where = str(folders["hpsv2"])
    reward = kind(where, checkpoint=where, batch_size=3)
    for images, prompt, expected in cases("hpsv2"):
        assert reward(images, prompt) == pytest.approx(expected, rel=1e-5, abs=2e-6)
    without = kind(where, checkpoint=where, antialias=False)
    assert reward(inputs.images(128, 128), prompt) != without(inputs.images(128, 128), prompt)


def test_hpsv2_reads_prompts_as_its_package_does() -> None:
    ours = tokenizer()
    for prompt, expected in zip(inputs.PROMPTS, EXPECTED["hpsv2"]["ids"], strict=True):
        ids = ours(clean(prompt), truncation=True, max_length=inputs.TOKENS)["input_ids"]
        assert ids == expected[: len(ids)] and not any(expected[len(ids) :])


@SCALED_BY_PILLOW
def test_the_aesthetic_score_is_its_authors(folders: dict[str, Path]) -> None:
    reward = Aesthetic(str(folders["aesthetic"]), head=str(folders["aesthetic"]), batch_size=3)
    for name, size in SIZES.items():
        expected = EXPECTED["aesthetic"]["scores"][name]
        assert reward(inputs.images(*size), ANY) == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("sides", "small"), [((105, 192), 123), ((192, 105), 123), ((768, 1024), 168)])
def test_hpsv2_makes_images_small_and_pads_them_as_its_package_does(sides: tuple[int, int], small: int) -> None:
    """Rows and columns by the package's own formula: round(side * (224 / longer)), and half of the rest before it."""
    white = prepared(np.full((1, *sides, 3), 255, np.uint8), 224, antialias=True)[0, 0] > 0
    rows, columns = white.any(1).nonzero()[:, 0].tolist(), white.any(0).nonzero()[:, 0].tolist()
    shorter, longer = (rows, columns) if sides[0] < sides[1] else (columns, rows)
    before = (224 - small) // 2
    assert shorter == list(range(before, before + small)) and longer == list(range(224))


def test_a_checkpoint_that_would_run_code_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": Path("/")}}, tmp_path / "hps.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        HPSv2(str(folders["hpsv2"]), checkpoint=str(tmp_path / "hps.pt"))(inputs.images(48, 48), ANY)


PINNED = """
from async_flowrl.rewards import aesthetic, clip, hps
import numpy as np, sys
from async_flowrl.types import ByteArray, Prompt
pin = sys.argv[1]
for reward in (
    clip.PickScore("up/pickscore", processor="up/clip_score", revision=pin, processor_revision=pin),
    clip.ClipScore("up/clip_score", revision=pin),
    hps.HPSv2("up/hpsv2b", checkpoint="up/hpsv2", revision=pin, model_revision=pin),
    aesthetic.Aesthetic("up/aesthetic", head="up/aesthetic", revision=pin, head_revision=pin),
):
    assert np.isfinite(reward(np.zeros((1, 8, 8, 3), dtype=np.uint8), Prompt(0, "a cup")))
"""


@pytest.mark.slow
def test_a_pinned_reward_loads_nothing_of_another_commit(folders: dict[str, Path], tmp_path: Path) -> None:
    """From a hub on loopback: whatever is asked for without a commit is asked of `main`."""
    repositories = {f"up/{name}": folder for name, folder in folders.items()}
    with serving({**repositories, "up/hpsv2b": folders["hpsv2"]}) as hub:
        ran = subprocess.run(
            [sys.executable, "-c", PINNED, COMMIT],
            env={**os.environ, **hub.environment(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ran.returncode == 0, ran.stderr
    assert {line.split("/")[2] for line in hub.asked} >= {"pickscore", "clip_score", "hpsv2", "hpsv2b", "aesthetic"}
    assert not [line for line in hub.asked if "/main" in line]


PROMPT = Prompt(0, "a red fox")
BUILT: dict[str, Callable[[dict[str, Path]], Any]] = {
    "sharpness": lambda _: sharpness,
    "clip_score": lambda of: ClipScore(str(of["clip_score"])),
    "pickscore": lambda of: PickScore(str(of["pickscore"]), processor=str(of["pickscore"])),
    "hpsv2": lambda of: HPSv2(str(of["hpsv2"]), checkpoint=str(of["hpsv2"])),
    "aesthetic": lambda of: Aesthetic(str(of["aesthetic"]), head=str(of["aesthetic"])),
}


def smooth(height: int, width: int, count: int = 3) -> np.ndarray:
    """Images uint8 [n, H, W, 3] whose sides differ, as photographs are: neighbours are alike."""
    noise = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3)).astype(np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC)) for each in noise]
    )


@pytest.mark.parametrize("size", [(40, 40), (64, 48)])
@pytest.mark.parametrize("name", BUILT)
def test_a_tensor_gets_the_score_of_its_bytes(name: str, size: tuple[int, int], folders: dict[str, Path]) -> None:
    """But for the rounding of resized images, and of greys, to bytes, which is noise to the Laplacian."""
    reward, images = BUILT[name](folders), smooth(*size)
    near = 2.0 if name == "sharpness" else 2e-3
    pixels = torch.from_numpy(images.astype(np.float32) / 255).permute(0, 3, 1, 2)
    scores = reward.of_tensor(pixels, PROMPT)
    assert scores.tolist() == pytest.approx(list(reward(images, PROMPT)), rel=0.02, abs=near)


@pytest.mark.extended
@pytest.mark.parametrize("name", BUILT)
def test_the_gradient_is_the_slope_of_the_score(name: str, folders: dict[str, Path]) -> None:
    reward = BUILT[name](folders)
    pixels = torch.from_numpy(smooth(40, 40, 1).astype(np.float32) / 255).permute(0, 3, 1, 2)
    pixels = pixels.clamp(0.1, 0.9).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward.of_tensor(pixels, PROMPT).sum(), pixels)
    way = 1e-2 * gradient / gradient.abs().max()
    with torch.no_grad():
        ahead, behind = (reward.of_tensor(pixels + sign * way, PROMPT).double() for sign in (1, -1))
    assert float(ahead - behind) == pytest.approx(2 * float((gradient * way).sum()), rel=0.1)
    assert float(ahead - behind) > 0


def test_rewards_without_a_gradient_and_groups_of_one_are_refused(tmp_path: Path) -> None:
    usual = ("model=tiny", f"output_dir={tmp_path / 'run'}", "group_size=1")
    with pytest.raises(ValueError, match=r"reward\.terms\.ocr.*pickscore"):
        prepare(precheck(compose_config("one_step_off", [*usual, "reward=ocr", "algorithm=direct_align"])))
    with pytest.raises(ValueError, match="group_size"):
        prepare(precheck(compose_config("one_step_off", [*usual, "reward=sharpness"])))
    check_differentiable(compose_config("one_step_off", ["reward=sharpness"]).reward)
    for reward in ("clip_direction", "jpeg_compressibility"):
        with pytest.raises(ValueError, match=rf"reward\.terms\.{reward}"):
            check_differentiable(compose_config("one_step_off", [f"reward={reward}"]).reward)
    settings = ("reward=sharpness", "algorithm=direct_align", "data.curriculum.after=1")
    with pytest.raises(ValueError, match="curriculum"):
        prepare(precheck(compose_config("one_step_off", [*usual, *settings])))


def test_a_vae_alone_needs_no_weights_of_text_encoders() -> None:
    wanted = patterns(["scheduler", "text_encoder", "tokenizer", "transformer", "vae"], "vae")
    assert {"vae/*", "tokenizer/*"} <= set(wanted)
    assert {"text_encoder/*", "transformer/*"}.isdisjoint(wanted)


def test_videos_are_refused(tmp_path: Path) -> None:
    video = ("model=tiny_wan21", f"output_dir={tmp_path / 'run'}", "reward=sharpness", "rollout.frames=5")
    with pytest.raises(ValueError, match=r"direct_align.*5 frames"):
        prepare(precheck(compose_config("one_step_off", [*video, "algorithm=direct_align"])))
