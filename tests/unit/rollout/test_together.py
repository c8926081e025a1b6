"""Tests of several tickets in one batch of the reference engine: results and failures are each ticket's own."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from async_flowrl.policies import pipeline
from async_flowrl.rollout.batching import BatchingEngine, check_shareable, merged_spans
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive
from async_flowrl.types import Prompt, RolloutRequest, Span
from tests.support.tiny import request, sampling
from tests.unit.rollout.trajectories import trajectory_of

TEXTS = ("red red red red", "a very long prompt about a blue square, a red circle and more", "a hill")


def tickets(cfg: float = 1.0) -> list[RolloutRequest]:
    """Of other prompts, texts of other lengths and other noise."""
    return [
        replace(
            request(2, how=sampling(cfg=cfg), prompt=Prompt(ordinal, text)),
            ordinal=ordinal,
            initial_seeds=(derive(ordinal, "a"), derive(ordinal, "b")),
            noise_seeds=(derive(ordinal, "c"), derive(ordinal, "d")),
        )
        for ordinal, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(("cfg", "chunk"), [(1.0, None), (4.0, None), (4.0, 1)])
def test_tickets_of_a_batch_are_what_they_are_alone(policy: Any, cfg: float, chunk: int | None) -> None:
    engine, alone = (kind(policy, batch_size=chunk) for kind in (BatchingEngine, DiffusersEngine))
    made = engine.generate_together(tickets(cfg))
    for one, ticket in zip(made, tickets(cfg), strict=True):
        expected = trajectory_of(alone.generate(ticket))
        assert np.abs(trajectory_of(one).latents - expected.latents).max() < 1e-5
        assert np.abs(trajectory_of(one).log_probs - expected.log_probs).max() < 1e-5
        assert np.array_equal(trajectory_of(one).conditioning["prompt_embeds"], expected.conditioning["prompt_embeds"])
    for one, again in zip(made, engine.generate_together(tickets(cfg)), strict=True):
        assert np.array_equal(one.images, again.images)
        assert np.array_equal(trajectory_of(one).latents, trajectory_of(again).latents)


def test_the_network_runs_once_per_step_for_all(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    network = policy._network

    def counted(latents: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(latents))
        return network(latents, *others)

    monkeypatch.setattr(policy, "_network", counted)
    made = BatchingEngine(policy).generate_together(tickets())
    assert rows == [6] * 6
    spans = [span for one in made for span in one.spans if span.name == "generate"]
    assert len({span.flops for span in spans}) == 1 and spans[0].flops


def test_negative_prompts_may_have_a_pass_of_their_own(policy: Any) -> None:
    """As they have on CUDA, where those of all tickets are alike and need no padding."""
    asked, lengths = tickets(4.0), list[set[int]]()
    expected = BatchingEngine(policy).generate_together(asked)
    network = policy._network

    def noted(latents: torch.Tensor, sigma: torch.Tensor, branches: Any, *others: Any) -> torch.Tensor:
        lengths.append({len(branch["prompt_embeds"]) for branch in branches})
        return network(latents, sigma, branches, *others)

    with patch.object(policy, "_network", noted), patch.object(pipeline, "apart", return_value=True):
        made = BatchingEngine(policy).generate_together(asked)
    assert len(lengths) == 2 * 6 and all(len(texts) == 3 for texts in lengths[::2])
    assert all(len(texts) == 1 for texts in lengths[1::2])
    for one, other in zip(made, expected, strict=True):
        assert np.abs(trajectory_of(one).latents - trajectory_of(other).latents).max() < 1e-5


def test_a_ticket_that_fails_is_named_and_leaves_the_engine_whole(policy: Any) -> None:
    engine, asked = BatchingEngine(policy), tickets()
    wrong = replace(asked[1], train_steps=(5,), noise_steps=(1,))
    with pytest.raises(ValueError, match=r"request of ticket 1: train_steps \(5,\)"):
        engine.generate_together([asked[0], wrong, asked[2]])
    assert len(engine.generate_together(asked)) == 3


def test_a_network_that_fails_fails_every_ticket(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy, "_network", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        BatchingEngine(policy).generate_together(tickets())


def test_tickets_that_differ_cannot_share(policy: Any) -> None:
    one, other, _ = tickets()
    for different in (replace(other, version=9), replace(other, sampling=sampling(cfg=2.0)), request(3)):
        with pytest.raises(ValueError, match=r"tickets 0 and \d cannot share a batch"):
            BatchingEngine(policy).generate_together([one, different])
    with pytest.raises(ValueError, match="built on PipelinePolicy, own is not"):
        check_shareable(type("Own", (), {"family": "own"})())


def test_the_spans_of_a_batch_are_one_of_each_name() -> None:
    spans = [(Span("generate", 1, 5, 10.0), Span("decode", 5, 6, bytes=3)), (Span("generate", 2, 4, 10.0),)]
    assert merged_spans(spans) == (Span("generate", 1, 5, 20.0), Span("decode", 5, 6, bytes=3))
