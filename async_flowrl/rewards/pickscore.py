"""The reward `pickscore`: how well people would like an image for its prompt.

A CLIP model computes it, which was trained on people's choices between two images.
"""

from collections.abc import Sequence
from typing import Any

from async_flowrl.rewards.clip import Clip, memory_gib
from async_flowrl.rewards.weights import check_model_options, check_pins
from async_flowrl.types import ByteArray, Prompt


class PickScore:
    """exp(logit_scale) * cos(image, text) / `scale` (Kirstain et al. 2023, "Pick-a-Pic", section 4).

    flow_grpo trains on it divided by 26 and reports it with `scale=1`, about 20 to 24. `device="auto"` uses a GPU if
    this process sees one; a reward worker does if it has `gpus_per_worker` above 0.
    """

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        *,
        revision: str | None = None,
        processor_revision: str | None = None,
        scale: float = 26.0,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        check_model_options("PickScore", device=device, batch_size=batch_size, scale=scale)
        if processor != model:
            check_pins("PickScore", revision=(model, revision), processor_revision=(processor, processor_revision))
        self._clip = Clip(
            "PickScore", model, processor, revision, batch_size, device, processor_revision=processor_revision
        )
        self._scale = scale

    @staticmethod
    def memory_gib(model: str = "yuvalkirstain/PickScore_v1", **options: Any) -> float | None:
        """Returns the device memory of the CLIP model in GiB; None if its size is unknown."""
        return memory_gib(model, **options)

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if the model or the processor is a local path that does not exist."""
        self._clip.check()

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        factor = self._clip.logit_scale() / self._scale
        return [factor * cosine for cosine in self._clip.cosines(images, prompt.text)]
