"""Tests of the asynchronous controller against a plain loop without controller, workers or delivery: equal weights."""

import numpy as np
import pytest

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest
from async_flowrl.training.parts import cut
from async_flowrl.types import Prompt
from checkpoint_engine import Draft, Layout
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import Timing
from tests.support.toy_reward import ToyReward
from tests.support.toy_rollout import ToyRollout
from tests.support.toy_trainer import ToyTrainer


def plain_loop(config: Config) -> str:
    """Step after step, group after group: sample from the version K steps back, score, train."""
    recipe = RequestBuilder(config, [Prompt(index, f"prompt {index}") for index in range(5)], [])
    trainer, reward = ToyTrainer(config, 0, "trainer"), ToyReward(config, 0, "reward")
    algorithm = build_algorithm(config)
    for step in range(config.total_steps):
        version = max(0, step - config.max_staleness)
        rollout = ToyRollout(config, 0, "rollout")
        rollout.load()
        layout = Layout.of(rollout.tensors)
        data = layout.empty()
        for name, view in layout.views(data).items():
            view.copy_(trainer.retained[version][name])
        header = Draft("policy", version, layout, alpha=4.0, rank=2).sealed(layout.digests(data.numpy()))
        rollout.receiver.receive(header, data.numpy())
        rows = config.prompts_per_step * config.group_size * (config.rollout.num_inference_steps - 1)
        trainer.begin(step, StepPlan(rows=rows))
        for group in range(config.prompts_per_step):
            request = recipe.request(Ticket(TRAIN, step * config.prompts_per_step + group, step, group, 0, version))
            _, images, trajectory = rollout.generate([request])
            scores = reward.score(["color"], request.prompt, images)
            (found,) = algorithm.advantages({"color": [np.asarray(scores.total)]}, weights={"color": 1.0}, seeds=[0])
            advantages = tuple(float(x) for x in found)
            meta = GroupMeta(
                group,
                1,
                version,
                step - version,
                advantages,
                cut(range(4), config.trainer.micro_batch_size),
                (),
                "",
                request.sampling,
            )
            trainer.accumulate([meta], trajectory)
        trainer.add_up(TrainRequest(step, ()))
        trainer.take_step()
    return trainer.weights_digest()


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_controller_trains_exactly_what_a_plain_loop_trains(k: int) -> None:
    config = toy_config(k, hand_over="stream", ticket_size=2, rollout__num_workers=3)
    assert shape(config).tickets_per_group == 2
    assert virtual(config, Timing(seed=k, spread=0.9)).digest == plain_loop(toy_config(k))
