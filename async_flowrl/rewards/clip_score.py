"""The reward `clip_score`: how well an image fits its prompt, by a published CLIP model."""

from collections.abc import Sequence
from typing import Any

from async_flowrl.rewards.clip import Clip, memory_gib
from async_flowrl.rewards.weights import check_model_options
from async_flowrl.types import ByteArray, FloatArray, Prompt


class ClipScore:
    """100 * cos(image, text) / `scale` (Hessel et al. 2021, "CLIPScore", without its factor 2.5 and its cut at 0).

    `scale=1` gives the number that torchmetrics' CLIPScore averages, about 20 to 35 for images that fit; flow_grpo
    trains on it divided by 30. Prompts are cut to 77 tokens and keep their end token (torchmetrics cuts off the end
    token, too).
    """

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        *,
        revision: str | None = None,
        scale: float = 1.0,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        check_model_options("CLIP score", device=device, batch_size=batch_size, scale=scale)
        self._clip = Clip("CLIP score", model, None, revision, batch_size, device)
        self._scale = scale

    @staticmethod
    def memory_gib(model: str = "openai/clip-vit-large-patch14", **options: Any) -> float | None:
        """Returns the device memory of the CLIP model in GiB; None if its size is unknown."""
        return memory_gib(model, **options)

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if the model is a local path that does not exist."""
        self._clip.check()

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return [100.0 * cosine / self._scale for cosine in self._clip.cosines(images, prompt.text)]

    def features(self, images: ByteArray) -> FloatArray:
        """Returns embeddings float32 [n, d] of length 1, by which evaluations measure how different images are."""
        import torch

        with torch.inference_mode():
            return torch.cat([batch.float().cpu() for batch in self._clip.image_embeddings(images)]).numpy()
