"""Generation and training in plain calls of diffusers, peft and torch, for benchmarks to compare the worker pools with.

`generate` samples images of one prompt as Flow-GRPO does: noisy steps except for the last, log-probabilities, VAE
decoding. `update` trains on their trajectories: forward, clipped loss, backward, gradient clipping, AdamW.
Its advantages are random numbers, because only its speed matters. It uses nothing of this project.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from peft import LoraConfig
from torch import Tensor

Group = tuple[str, list[Tensor], list[Tensor]]
"""Prompt, latents [n, tokens, 64] before the first and after every denoising step, and log-probabilities [n] of every
step except the last (means over a latent's numbers)."""


class Bare:
    """A Qwen-Image pipeline with a LoRA, an optimizer and a fixed schedule of `steps` steps, on torch's default device.

    Images are square, of `side` pixels, a multiple of 16; there is no classifier-free guidance.
    """

    def __init__(self, path: str, side: int, steps: int, *, targets: list[str], rank: int, dtype: torch.dtype) -> None:
        self.pipe: Any = QwenImagePipeline.from_pretrained(path, dtype=dtype).to(torch.get_default_device())
        for part in (self.pipe.transformer, self.pipe.vae, self.pipe.text_encoder):
            part.eval().requires_grad_(False)
            # On a CPU, weights that are mapped from a file are not aligned in memory, and their products are slower.
            for tensor in part.parameters():
                tensor.data = tensor.data.clone()
        self.pipe.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
        self.side, self.rows, self.dtype = side, side // (2 * self.pipe.vae_scale_factor), dtype
        self.texts: dict[str, Tensor] = {}
        config = self.pipe.scheduler.config
        lengths = config.base_image_seq_len, config.max_image_seq_len
        mu = calculate_shift(self.rows**2, *lengths, config.base_shift, config.max_shift)
        retrieve_timesteps(self.pipe.scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        self.sigmas: list[float] = self.pipe.scheduler.sigmas.tolist()
        self.trained = [p for p in self.pipe.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)

    def velocity(self, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Returns the velocity [n, tokens, 64] in float32 of latents x [n, tokens, 64] at noise levels sigma [n]."""
        shapes = [[(1, self.rows, self.rows)]] * len(x)
        embeds = text.expand(len(x), -1, -1)
        out: Tensor = self.pipe.transformer(x.to(self.dtype), embeds, None, sigma, shapes, return_dict=False)[0]
        return out.float()

    def step(self, x: Tensor, v: Tensor, s: Tensor, after: Tensor, level: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns mean [n, tokens, 64] and standard deviation [n, 1, 1] of Flow-GRPO's noisy step (arXiv:2505.05470).

        The step goes from noise level `s` [n, 1, 1] to `after` [n, 1, 1]; `v` is the velocity at x, `level` the paper's
        noise level a.
        """
        g2 = level**2 * s / (1 - torch.where(s >= 1 - 1e-6, self.sigmas[1], s))
        dt = after - s
        return x * (1 + g2 / (2 * s) * dt) + v * (1 + g2 * (1 - s) / (2 * s)) * dt, torch.sqrt(-g2 * dt)

    def log_prob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (-((x - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)).mean(dim=(1, 2))

    @torch.no_grad()
    def generate(self, text: str, n: int) -> tuple[npt.NDArray[np.uint8], Group]:
        """Returns images uint8 [n, H, W, 3] of the prompt `text` and their trajectories, which `update` takes."""
        if text not in self.texts:
            self.texts[text] = self.pipe.encode_prompt(text)[0]
        xs = [torch.randn(n, self.rows**2, 64)]
        log_probs: list[Tensor] = []
        for s, after in pairwise(torch.tensor(self.sigmas).view(-1, 1, 1, 1).expand(-1, n, 1, 1)):
            v = self.velocity(xs[-1], s.flatten(), self.texts[text])
            if len(log_probs) == len(self.sigmas) - 2:
                xs.append(xs[-1] + v * (after - s))
                break
            mean, std = self.step(xs[-1], v, s, after)
            xs.append(mean + std * torch.randn_like(mean))
            log_probs.append(self.log_prob(xs[-1], mean, std))
        config = self.pipe.vae.config
        latents = self.pipe._unpack_latents(xs[-1], self.side, self.side, self.pipe.vae_scale_factor)
        std, mean = (torch.tensor(a).view(1, -1, 1, 1, 1) for a in (config.latents_std, config.latents_mean))
        decoded = self.pipe.vae.decode((latents * std + mean).to(self.dtype), return_dict=False)[0][:, :, 0]
        images = self.pipe.image_processor.postprocess(decoded, output_type="np")
        return (images * 255).round().astype(np.uint8), (text, xs, log_probs)

    def update(self, groups: list[Group], *, trained: int, at_once: int) -> None:
        """Makes one optimizer step from the first `trained` denoising steps of every group.

        A forward pass computes `at_once` of them; `at_once` must divide `trained`.
        """
        self.optimizer.zero_grad()
        for text, xs, old in groups:
            n = len(xs[0])
            advantages = torch.randn(n).repeat(at_once)
            for first in range(0, trained, at_once):
                at = range(first, first + at_once)
                s, after = (torch.tensor([self.sigmas[i + d] for i in at for _ in range(n)]) for d in (0, 1))
                x, following = (torch.cat([xs[i + d] for i in at]) for d in (0, 1))
                v = self.velocity(x, s, self.texts[text])
                mean, std = self.step(x, v, s.view(-1, 1, 1), after.view(-1, 1, 1))
                ratio = torch.exp(self.log_prob(following, mean, std) - torch.cat([old[i] for i in at]))
                loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.1)).mean()
                (loss * at_once / (trained * len(groups))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
