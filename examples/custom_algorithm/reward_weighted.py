"""Example of a custom algorithm: reward-weighted regression in place of Flow-GRPO's clipped surrogate loss.

Peters and Schaal, Reinforcement learning by reward-weighted regression for operational space control (ICML 2007):
sampled images become more likely in proportion to exp(advantage / temperature). The ratio is not clipped.
"""

import torch

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.flow_grpo import FlowGRPO
from async_flowrl.algorithms.policy_gradient import Surrogate
from async_flowrl.config.schema import AlgorithmConfig


class RewardWeighted(FlowGRPO):
    """Loss per image: -(exp(A / temperature) - 1) · ratio, where A is the clipped advantage.

    The weight is at least -1 (for images worse than the group's mean) and grows exponentially for better ones. The
    subtracted 1 is a baseline: it does not change the expected gradient, and an image with advantage 0 has no gradient.
    """

    name = "reward_weighted"

    def __init__(self, config: AlgorithmConfig, *, correction: str, temperature: float = 1.0) -> None:
        """`temperature` comes from `algorithm.options`. If it is not above 0, ValueError ends the run at its start."""
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        super().__init__(config, correction=correction)
        self.temperature = temperature

    def surrogate(self, batch: MicroBatch, current: Prediction, proximal: Prediction) -> Surrogate:
        """Returns tensors [B]; `proximal` is the prediction of the batch's start, so the ratio begins at 1."""
        ratio = torch.exp(current["log_prob"] - proximal["log_prob"])
        weight = torch.expm1(self.clipped_advantages(batch) / self.temperature)
        inside = torch.zeros_like(ratio, dtype=torch.bool)
        return Surrogate(-weight * ratio, ratio, inside, ~inside)
