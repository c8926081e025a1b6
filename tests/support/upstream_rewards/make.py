"""`python -m tests.support.upstream_rewards.make` writes expected.json, the scores of upstream code on tiny weights.

It needs an environment of its own, because upstream requires other package versions; README.md says how to make one.
"""

import ast
import gzip
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from async_flowrl.rewards.hps import to_transformers
from tests.support.json_rows import json_rows
from tests.support.upstream_rewards.inputs import (
    EMBED,
    LAYERS,
    MERGES,
    PATCH,
    PROMPTS,
    SIDE,
    TOKENS,
    WIDTH,
    clip_config,
    clip_weights,
    head_weights,
    images,
    vocabulary,
)

SEEDS = {"hpsv2": 1, "aesthetic": 2, "clip_score": 3, "pickscore": 4}
SIZES = {"48": (48, 48), "128": (128, 128), "45x100": (45, 100), "135x64": (135, 64), "30x21": (30, 21)}
"""Of the images, height and width: little and much larger than what the models see, both ways up, and one that is
enlarged. The rows and columns that are cut off or filled up at the two ends are not always equally many."""


def define_torchvision_operators() -> None:
    """Defines the names of torchvision's compiled operators, so that its CUDA wheel can be imported without CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    backward = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")
    for name in (*backward, *(f"_{each}_backward" for each in backward), "nms", "qnms", "qroi_align"):
        library.define(f"{name}(Tensor x) -> Tensor")
    globals()["_library"] = library


def pictures(size: str) -> list[Image.Image]:
    return [Image.fromarray(image) for image in images(*SIZES[size])]


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in state.items()}


def merges_file(folder: Path) -> Path:
    """Writes the merges in the form that OpenAI's tokenizer reads: a header, then one per line, no empty line."""
    path = folder / "merges.txt.gz"
    path.write_bytes(gzip.compress("\n".join(["#version: tiny", *MERGES]).encode()))
    return path


def hpsv2(folder: Path) -> dict[str, Any]:
    """Returns scores and token ids of hpsv2.img_score.score, with a tiny model in place of ViT-H-14."""
    from hpsv2 import img_score
    from hpsv2.src.open_clip import factory, tokenizer

    tokenizer._tokenizer = tokenizer.SimpleTokenizer(bpe_path=str(merges_file(folder)))
    tower = {"width": WIDTH, "layers": LAYERS}
    config = {
        "embed_dim": EMBED,
        "vision_cfg": {**tower, "image_size": SIDE, "patch_size": PATCH},
        "text_cfg": {**tower, "context_length": TOKENS, "vocab_size": len(vocabulary()), "heads": WIDTH // 64},
    }
    factory._MODEL_CONFIGS["tiny"] = config
    model, _, preprocess = factory.create_model_and_transforms("tiny", None, precision="amp", output_dict=True,
                                                               light_augmentation=True, aug_cfg={})  # fmt: skip
    img_score.model_dict |= {"model": model, "preprocess_val": preprocess}
    checkpoint = folder / "hps.pt"
    torch.save({"state_dict": tensors(clip_weights(SEEDS["hpsv2"]))}, checkpoint)
    scores = {
        size: [[float(x) for x in img_score.score(pictures(size), prompt, cp=str(checkpoint))] for prompt in PROMPTS]
        for size in SIZES
    }
    ids = [tokenizer.tokenize(prompt)[0].tolist() for prompt in PROMPTS]
    return {"scores": scores, "ids": ids, "version": f"hpsv2 {version('hpsv2')}, torchvision {version('torchvision')}"}


def aesthetic(folder: Path, upstream: Path) -> dict[str, Any]:
    """Returns scores of OpenAI's clip with the classes in `upstream`/simple_inference.py (aesthetic predictor)."""
    import clip
    import pytorch_lightning as lightning

    weights = tensors(clip_weights(SEEDS["aesthetic"]))
    model = clip.model.build_model(dict(weights)).float().eval()
    model.load_state_dict(weights)  # build_model has rounded them to float16
    prepare = clip.clip._transform(SIDE)
    tree = ast.parse((upstream / "simple_inference.py").read_text())
    wanted = [node for node in tree.body if getattr(node, "name", None) in ("MLP", "normalized")]
    names: dict[str, Any] = {"pl": lightning, "nn": torch.nn, "np": np}
    exec(compile(ast.Module(wanted, []), "simple_inference.py", "exec"), names)
    head = names["MLP"](EMBED).eval()
    head.load_state_dict(tensors(head_weights(SEEDS["aesthetic"])))
    scores = {}
    with torch.no_grad():
        for size in SIZES:
            features = model.encode_image(torch.stack([prepare(picture) for picture in pictures(size)]))
            normal = names["normalized"](features.numpy())
            scores[size] = head(torch.from_numpy(normal).float())[:, 0].tolist()
    return {"scores": scores, "version": "openai/CLIP d05afc4, improved-aesthetic-predictor 6934dd8"}


def transformers_clip(seed: int) -> tuple[Any, Any]:
    """Returns CLIPModel and CLIPProcessor of transformers, with weights drawn from `seed`."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

    model = CLIPModel(CLIPConfig(**clip_config("quick_gelu"))).eval()
    model.load_state_dict(to_transformers(tensors(clip_weights(seed))))
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        names[0].write_text(json.dumps({entry: place for place, entry in enumerate(vocabulary())}))
        names[1].write_text("\n".join(["#version: 0.2", *MERGES, ""]))
        tokenizer = CLIPTokenizerFast(str(names[0]), str(names[1]), model_max_length=TOKENS)
    sides = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return model, CLIPProcessor(CLIPImageProcessor(**sides), tokenizer)


def clip_score(folder: Path) -> dict[str, Any]:
    """Returns scores of torchmetrics' CLIPScore, one image at a time.

    The last prompt is left out: torchmetrics would truncate it in another way.
    """
    from torchmetrics.functional.multimodal import clip_score as score

    model, processor = transformers_clip(SEEDS["clip_score"])
    scores = {}
    for size in SIZES:
        chw = [torch.from_numpy(image).permute(2, 0, 1) for image in images(*SIZES[size])]
        each = [[float(score(image, prompt, lambda: (model, processor))) for image in chw] for prompt in PROMPTS[:-1]]
        scores[size] = each
    return {
        "scores": scores,
        "version": f"torchmetrics {version('torchmetrics')}, transformers {version('transformers')}",
    }


def pickscore(folder: Path) -> dict[str, Any]:
    """Returns the scores of calc_probs in PickScore's README, before its softmax."""
    model, processor = transformers_clip(SEEDS["pickscore"])
    options = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
    scores: dict[str, list[list[float]]] = {size: [] for size in SIZES}
    with torch.no_grad():
        for size in SIZES:
            for prompt in PROMPTS:
                image_embs = model.get_image_features(**processor(images=pictures(size), **options))
                image_embs = image_embs / torch.norm(image_embs, dim=-1, keepdim=True)
                text_embs = model.get_text_features(**processor(text=prompt, **options))
                text_embs = text_embs / torch.norm(text_embs, dim=-1, keepdim=True)
                scores[size].append((model.logit_scale.exp() * (text_embs @ image_embs.T)[0]).tolist())
    return {"scores": scores, "version": f"PickScore f79607f, transformers {version('transformers')}"}


def main() -> None:
    upstream = Path(sys.argv[1])
    sys.path.insert(0, str(upstream))
    define_torchvision_operators()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = {
            "hpsv2": hpsv2(folder),
            "aesthetic": aesthetic(folder, upstream),
            "clip_score": clip_score(folder),
            "pickscore": pickscore(folder),
        }
    Path(__file__).with_name("expected.json").write_text(json_rows(expected) + "\n")


if __name__ == "__main__":
    main()
