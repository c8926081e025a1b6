"""CLIP (Radford et al. 2021) for rewards: embeddings by transformers' CLIPModel, and `clip_score` and `pickscore`.

Both rewards are the cosine of an image's and its prompt's embedding, by a published model or by one that was trained on
people's choices between two images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from PIL import Image

from async_flowrl.rewards.model_weights import check_model_options, check_path, check_pins, choose_device, loading
from async_flowrl.types import ByteArray, FloatArray, Prompt

if TYPE_CHECKING:
    import torch

# Of CLIP's text encoder; a longer prompt is cut and keeps its end token.
MAX_TOKENS = 77

# OpenAI's mean and standard deviation of red, green and blue, for pixels in 0 .. 1.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Distance of two embeddings of length 1 below which an edit has no direction.
UNCHANGED = 1e-3
# GiB of ViT-H/14 and ViT-L/14: of the weights in float32, of the activations per image of a batch, and with gradient.
VIT_H, VIT_L = (3.68, 0.0202, 0.396), (1.60, 0.0163, 0.332)
PUBLISHED = {
    "yuvalkirstain/PickScore_v1": VIT_H,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": VIT_H,
    "openai/clip-vit-large-patch14": VIT_L,
}


@dataclass(eq=False)
class Clip:
    """A CLIP model of one reward, loaded in the first call from a local folder or the hub.

    Only safetensors files are read, and no code of the repository runs. The revision is a commit on the hub; None
    means the newest. A subclass has the reward's `name` in messages, and its options as further fields.
    """

    model: str = "openai/clip-vit-large-patch14"
    revision: str | None = None
    batch_size: int = 16
    device: str = "auto"
    name: ClassVar[str]
    differentiable: ClassVar[bool] = True
    # The CLIPModel, float32 on its device, once it is loaded, and its tokenizer and image preparation.
    network: Any = field(default=None, init=False)
    _tokenizer: Any = field(default=None, init=False)
    _processor: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        scale = getattr(self, "scale", 1.0)
        check_model_options(self.name, device=self.device, batch_size=self.batch_size, scale=scale)

    @classmethod
    def memory_gib(
        cls, *, model: str | None = None, batch_size: int = 16, device: str = "auto", differentiated: int = 0, **_: Any
    ) -> float | None:
        """Returns the GiB of device memory while a batch is embedded: 0 with device="cpu", None for an unknown model.

        `differentiated` is the number of images through which a gradient goes instead.
        """
        if (model or cls.model) not in PUBLISHED:
            return None
        weights, image, with_gradient = PUBLISHED[model or cls.model]
        passing = differentiated * with_gradient or batch_size * image
        return 0.0 if device == "cpu" else weights + passing

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError for an option that is a local path and does not exist. Nothing is loaded."""
        check_path(self.name, "model", self.model)

    def image_embeddings(self, images: ByteArray | Sequence[ByteArray]) -> Iterator["torch.Tensor"]:
        """Yields embeddings of images uint8 [n, H, W, 3], batch by batch: float32 [b, d] of length 1, on the device."""
        network = self.load()
        size = int(network.config.vision_config.image_size)
        for start in range(0, len(images), self.batch_size):
            pixels = self._pixels(images[start : start + self.batch_size], size).to(network.device)
            yield _unit(network.get_image_features(pixel_values=pixels))

    def tensor_embeddings(self, images: "torch.Tensor") -> "torch.Tensor":
        """Returns embeddings [n, d], with their gradient, of images float32 [n, 3, H, W] in 0 .. 1.

        They are prepared as tensors, as near to `image_embeddings` as images that are not rounded to bytes can be.
        """
        network = self.load()
        size = int(network.config.vision_config.image_size)
        return _unit(network.get_image_features(pixel_values=self.prepared_tensor(images.to(network.device), size)))

    @staticmethod
    def prepared_tensor(images: "torch.Tensor", size: int) -> "torch.Tensor":
        """Scales the shortest side of images [n, 3, H, W] to `size` (bicubic), crops the centre and normalises."""
        height, width = images.shape[2:]
        images = resized(images, *(int(size * side / min(height, width)) for side in (height, width))).clamp(0.0, 1.0)
        top, left = ((side - size) // 2 for side in images.shape[2:])
        return normalised(images[:, :, top : top + size, left : left + size])

    def tensor_cosines(self, images: "torch.Tensor", text: str) -> "torch.Tensor":
        import torch

        with torch.no_grad():
            prompt = self.text_embedding(text)
        return self.tensor_embeddings(images) @ prompt

    def text_embedding(self, text: str) -> "torch.Tensor":
        """Returns the embedding of a text: float32 [d] of length 1, on the device."""
        network = self.load()
        tokens = self._tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt").to(network.device)
        return _unit(network.get_text_features(**tokens))[0]

    def cosines(self, images: ByteArray, text: str) -> list[float]:
        """Returns the cosine of the image's and the text's embedding for every image."""
        import torch

        with torch.inference_mode():
            prompt = self.text_embedding(text)
            return [float(x) for batch in self.image_embeddings(images) for x in (batch @ prompt).double().cpu()]

    def load(self) -> Any:
        """Returns the CLIPModel, loaded in the first call. Raises ValueError if it cannot be loaded."""
        if self.network is None:
            from async_flowrl.transfers import ONE_AT_A_TIME

            with ONE_AT_A_TIME:
                if self.network is None:  # another thread may have loaded it while this one waited
                    self.network = self._load()
        return self.network

    def _load(self) -> Any:
        from transformers import CLIPImageProcessorPil, CLIPTokenizer

        from async_flowrl.transfers import settle

        device, (source, revision) = choose_device(self.name, self.device), self._preparation()
        with loading(self.name, source):
            # CLIPProcessor would pick another preparation, which rounds differently, if torchvision is installed.
            self._processor = CLIPImageProcessorPil.from_pretrained(source, revision=revision)
            self._tokenizer = CLIPTokenizer.from_pretrained(source, revision=revision)
        model = self._network()
        settle(model, device)
        return model

    def _preparation(self) -> tuple[str, str | None]:
        """Returns the place of the tokenizer and the image preparation, and its revision."""
        return self.model, self.revision

    def _network(self) -> Any:
        import torch
        from transformers import CLIPModel

        options = {"revision": self.revision, "use_safetensors": True, "trust_remote_code": False}
        with loading(self.name, self.model):
            return CLIPModel.from_pretrained(self.model, dtype=torch.float32, **options)

    def _pixels(self, images: Any, size: int) -> "torch.Tensor":
        """Scales the shortest side to `size` (bicubic), crops the centre and normalises: float32 [b, 3, size, size]."""
        inputs = self._processor([Image.fromarray(image) for image in images], return_tensors="pt")
        return cast("torch.Tensor", inputs["pixel_values"])


def as_openai_prepares(images: ByteArray, size: int) -> "torch.Tensor":
    """Scales the shortest side of images uint8 [b, H, W, 3] to `size` (bicubic), crops the centre and normalises.

    The crop begins where it does in OpenAI's package clip, which halves with torchvision's rounding to even numbers;
    transformers rounds down. Returns float32 [b, 3, size, size].
    """
    import numpy as np
    import torch

    height, width = images.shape[1:3]
    small = [int(size * side / min(height, width)) for side in (width, height)]
    left, top = (round((side - size) / 2) for side in small)
    box = (left, top, left + size, top + size)
    scaled = (Image.fromarray(image).resize(small, Image.Resampling.BICUBIC) for image in images)
    cut = [np.asarray(image.crop(box)) for image in scaled]
    pixels = torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2).float() / 255
    return normalised(pixels)


def normalised(pixels: "torch.Tensor") -> "torch.Tensor":
    """Returns pixels [b, 3, h, w] of 0 .. 1 less OpenAI's mean, divided by its standard deviation."""
    import torch

    mean, std = (torch.tensor(values, device=pixels.device).reshape(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


def resized(images: "torch.Tensor", height: int, width: int) -> "torch.Tensor":
    """Returns images [n, 3, H, W] resized bicubically with antialiasing, by matrices, whose gradient is repeatable."""
    import torch
    from torch.nn import functional

    def matrix(side: int, new: int) -> torch.Tensor:
        one = torch.eye(side)[None, None]
        rows = functional.interpolate(one, (new, side), mode="bicubic", align_corners=False, antialias=True)
        return rows[0, 0].to(images.device)

    rows, columns = matrix(images.shape[2], height), matrix(images.shape[3], width)
    return rows @ images @ columns.T


def _unit(features: Any) -> "torch.Tensor":
    vectors: torch.Tensor = getattr(features, "pooler_output", features)
    unit: torch.Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
    return unit


@dataclass(eq=False)
class ClipScore(Clip):
    """100 * cos(image, text) / `scale` (Hessel et al. 2021, "CLIPScore", without its factor 2.5 and its cut at 0).

    `scale=1` gives the number that torchmetrics' CLIPScore averages, about 20 to 35 for images that fit; flow_grpo
    trains on it divided by 30. Prompts are cut to 77 tokens and keep their end token (torchmetrics cuts it off).
    """

    scale: float = 1.0
    name: ClassVar[str] = "CLIP score"

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return [100.0 * cosine / self.scale for cosine in self.cosines(images, prompt.text)]

    def of_tensor(self, images: "torch.Tensor", prompt: Prompt) -> "torch.Tensor":
        return 100.0 / self.scale * self.tensor_cosines(images, prompt.text)

    def features(self, images: ByteArray) -> FloatArray:
        """Returns embeddings float32 [n, d] of length 1, by which evaluations measure how different images are."""
        import torch

        with torch.inference_mode():
            return torch.cat([batch.float().cpu() for batch in self.image_embeddings(images)]).numpy()


@dataclass(eq=False)
class ClipDirection(Clip):
    """cos(image - source, edited caption - source caption), of CLIP's embeddings, which have length 1.

    It is Gal et al. 2021 ("StyleGAN-NADA") as InstructPix2Pix (arXiv 2211.09800) takes it; an image whose embedding is
    nearer than UNCHANGED to its source's has 0. The columns `source` and `edited` hold captions of the prompt's first
    image before and after the edit.
    """

    source: str = "original_prompt"
    edited: str = "edited_prompt"
    name: ClassVar[str] = "CLIP direction"
    sources: ClassVar[bool] = True
    differentiable: ClassVar[bool] = False

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError for a prompt without its two captions, or if `model` is a path that does not exist."""
        super().check(prompt)
        captions = {column: prompt.metadata.get(column) for column in (self.source, self.edited)}
        for column, caption in captions.items():
            if not isinstance(caption, str) or not caption.strip():
                what = f"prompt {prompt.text!r:.80} has no text in its column {column!r}"
                raise ValueError(f"the CLIP direction needs captions before and after the edit, and {what}")
        if captions[self.source] == captions[self.edited]:
            raise ValueError(f"the captions of prompt {prompt.text!r:.80} before and after the edit are the same")

    def __call__(self, images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray]) -> Sequence[float]:
        import torch

        self.check(prompt)
        with torch.inference_mode():
            before, after = (self.text_embedding(prompt.metadata[of]) for of in (self.source, self.edited))
            direction, scores = (after - before).double(), []
            # The source goes with each batch, because embeddings from batches of another size differ in the last bits.
            for start in range(0, len(images), beside := max(1, self.batch_size - 1)):
                together = self.image_embeddings([sources[0], *images[start : start + beside]])
                source, *results = torch.cat(list(together)).double()
                change = torch.stack(results) - source
                cosines = torch.nn.functional.cosine_similarity(change, direction)
                scores += torch.where(change.norm(dim=-1) < UNCHANGED, 0.0, cosines).tolist()
            return scores


@dataclass(eq=False)
class PickScore(Clip):
    """exp(logit_scale) * cos(image, text) / `scale` (Kirstain et al. 2023, "Pick-a-Pic", section 4).

    flow_grpo trains on it divided by 26 and reports it with `scale=1`, about 20 to 24.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    processor_revision: str | None = None
    scale: float = 26.0
    name: ClassVar[str] = "PickScore"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processor != self.model:
            processor_revision = (self.processor, self.processor_revision)
            check_pins(self.name, revision=(self.model, self.revision), processor_revision=processor_revision)

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        check_path(self.name, "processor", self.processor)

    def _preparation(self) -> tuple[str, str | None]:
        return self.processor, self.revision if self.processor == self.model else self.processor_revision

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return [self._factor() * cosine for cosine in self.cosines(images, prompt.text)]

    def of_tensor(self, images: "torch.Tensor", prompt: Prompt) -> "torch.Tensor":
        return self._factor() * self.tensor_cosines(images, prompt.text)

    def _factor(self) -> float:
        # exp of the model's learned temperature, about 100.
        return float(self.load().logit_scale.detach().double().exp()) / self.scale
