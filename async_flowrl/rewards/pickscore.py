"""PickScore: how well people would like an image for its prompt, by a CLIP model trained on their choices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from async_flowrl.types import ByteArray, Prompt

if TYPE_CHECKING:
    import torch


class PickScore:
    """exp(logit_scale) * cos(image, text) / `scale` (Kirstain et al. 2023, "Pick-a-Pic", section 4).

    flow_grpo trains on it divided by 26 and reports it raw, about 20 to 24: `scale: 1`. Weights are loaded with the
    first call, from a local folder or the hub: safetensors, no code of the repository's. Prompts are cut to what CLIP's
    text encoder takes (77 tokens). `device`: auto takes a GPU where this process sees one, which reward workers on Ray
    do not: they own none.
    """

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        *,
        revision: str | None = None,
        scale: float = 26.0,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        if not scale > 0:
            raise ValueError(f"the PickScore reward's scale must be above 0, got {scale}")
        if batch_size < 1:
            raise ValueError(f"the PickScore reward's batch_size must be at least 1, got {batch_size}")
        self._model, self._processor, self._revision = model, processor, revision
        self._scale, self._batch_size, self._device = scale, batch_size, device
        self._loaded: tuple[Any, Any, torch.device] | None = None

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        import torch

        model, processor, device = self._load()
        scores: list[float] = []
        for start in range(0, len(images), self._batch_size):
            chunk = [Image.fromarray(image) for image in images[start : start + self._batch_size]]
            inputs = processor(
                text=[prompt.text], images=chunk, truncation=True, padding=True, max_length=77, return_tensors="pt"
            )
            with torch.no_grad():
                logits = model(**inputs.to(device)).logits_per_image
            scores.extend((logits[:, 0].double() / self._scale).tolist())
        return scores

    def _load(self) -> tuple[Any, Any, "torch.device"]:
        if self._loaded is None:
            import torch
            from transformers import CLIPModel, CLIPProcessor

            device = _device(self._device)
            options = {"revision": self._revision, "use_safetensors": True, "trust_remote_code": False}
            model = CLIPModel.from_pretrained(self._model, dtype=torch.float32, **options)
            self._loaded = model.eval().to(device), CLIPProcessor.from_pretrained(self._processor), device
        return self._loaded


def _device(wanted: str) -> "torch.device":
    """Raises ValueError for a GPU where this process sees none."""
    import torch

    seen = torch.cuda.is_available()
    device = torch.device("cuda" if seen else "cpu") if wanted == "auto" else torch.device(wanted)
    if device.type == "cuda" and not seen:
        raise ValueError(
            f"the PickScore reward's device is {wanted}, and this process sees no GPU, as reward workers on Ray own "
            "none: use auto or cpu"
        )
    return device
