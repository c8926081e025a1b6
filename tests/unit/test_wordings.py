"""Tests of the list of texts that a run will encode: the same as its tickets ask for, in the same order."""

from dataclasses import replace

from async_flowrl.config.schema import Config, DataConfig, RolloutConfig
from async_flowrl.tickets.request import RequestBuilder, asked_of, sampling, upcoming
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.types import Prompt

PROMPTS = [Prompt(index, f"prompt {index}") for index in range(7)]
HELD_OUT = [Prompt(0, "held out", negative="ugly", system="Be bold.")]


def builder(cfg: float = 1.0, *, shuffle: bool = True) -> RequestBuilder:
    config = Config(
        total_steps=5, prompts_per_step=2, data=DataConfig(shuffle=shuffle), rollout=RolloutConfig(true_cfg_scale=cfg)
    )
    return RequestBuilder(config, PROMPTS, HELD_OUT)


def test_evaluations_come_first_then_every_step_in_its_order() -> None:
    requests = builder()
    found = upcoming(requests, 100)
    assert found[0] == ("held out", "Be bold.", False) and len(found) == 8
    steps = [index for step in range(5) for index in requests.sampler.step(step)]
    assert [text for text, *_ in found[1:]] == [f"prompt {index}" for index in dict.fromkeys(steps)]
    assert upcoming(requests, 3) == found[:3]


def test_with_guidance_negative_prompts_are_among_them() -> None:
    requests = builder(4.0, shuffle=False)
    assert upcoming(requests, 4) == (
        ("held out", "Be bold.", False),
        ("ugly", None, True),
        ("prompt 0", None, False),
        (" ", None, True),
    )
    baseline = replace(builder(), baseline=replace(sampling(Config()), true_cfg_scale=4.0))
    assert ("ugly", None, True) in upcoming(baseline, 100)


def test_a_prompt_has_one_wording_per_branch() -> None:
    how = sampling(Config(rollout=RolloutConfig(true_cfg_scale=2.0)))
    ids = Prompt(0, "text", token_ids=(1, 2), negative_token_ids=(3,))
    assert asked_of(ids, how) == [((1, 2), None, False), ((3,), None, True)]


def test_what_is_foretold_is_what_is_asked() -> None:
    requests = builder(4.0)
    told = set(upcoming(requests, 100))
    for step in range(5):
        for group in range(2):
            ticket = Ticket(TRAIN, 2 * step + group, step, group, 0, 0)
            request = requests.request(ticket)
            assert told.issuperset(asked_of(request.prompt, request.sampling))
