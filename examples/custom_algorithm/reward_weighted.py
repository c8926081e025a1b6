"""An algorithm of one's own in twenty lines: reward-weighted regression in place of the clipped surrogate.

Peters and Schaal, Reinforcement learning by reward-weighted regression for operational space control (ICML 2007): make
what was sampled more likely, in proportion to exp(advantage / temperature). Nothing is pushed away, nothing is clipped.
"""

import torch

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.flow_grpo import FlowGRPO
from async_flowrl.algorithms.policy_gradient import Surrogate
from async_flowrl.config.algorithm_schema import AlgorithmConfig


class RewardWeighted(FlowGRPO):
    """loss = -(exp(A / temperature) - 1) · ratio: worse images than usual weigh at most 1, better ones any amount.

    The 1 is a baseline: it leaves the expected gradient as it is, and an image with advantage 0 without any.
    """

    name = "reward_weighted"

    def __init__(self, config: AlgorithmConfig, *, correction: str, temperature: float = 1.0) -> None:
        """`temperature` above 0 comes from algorithm.options; a ValueError is one sentence before the run starts."""
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        super().__init__(config, correction=correction)
        self.temperature = temperature

    def surrogate(self, batch: MicroBatch, current: Prediction, anchor: Prediction) -> Surrogate:
        """All [B]; `anchor` holds the log-probs at the start of the batch, so the ratio begins at exactly 1."""
        ratio = torch.exp(current["log_prob"] - anchor["log_prob"])
        weight = torch.expm1(self.clipped_advantages(batch) / self.temperature)
        inside = torch.zeros_like(ratio, dtype=torch.bool)
        return Surrogate(-weight * ratio, ratio, inside, ~inside)
