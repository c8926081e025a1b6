"""Rehearsal of a rollout worker: its real code on fake tensors, with loading, deliveries, and a ticket of two steps."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from async_flowrl.config.schema import Config
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.phases import Ledger, Phase
from async_flowrl.memory.rehearsal.process import rehearsed_process
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.tickets.request import RequestBuilder, sampling
from async_flowrl.tickets.table import Ticket
from async_flowrl.types import POLICY, TRAIN, Prompt, RolloutRequest
from checkpoint_engine import EVALUATION, RING, Draft, Header

STEPS = 2  # Denoising steps that are run, the first with noise; the remaining steps of a real ticket cost the same.


@dataclass(frozen=True)
class RolloutRehearsal:
    # Name → phase: load, encode, denoise, decode, delivery, and sample (the rest of a ticket).
    phases: dict[str, Phase]
    rows: int  # Images in a forward pass, without the second branch of classifier-free guidance.
    tickets: int  # Tickets in a batch: passes, chunks and phases are those of the whole batch.
    chunks: int  # Chunks of `rows` images in a ticket.
    passes: int  # Forward passes of a real ticket.
    run: int  # Forward passes of the rehearsed ticket.
    version_bytes: int
    vae_parameters: int


def rehearse_rollout(config: Config, model: FakeModel) -> RolloutRehearsal:
    """Rehearses a worker in steady state: all its slots for versions are full, and one more is being received."""
    if config.rollout.text_encoder == "cached":
        # A visit before the network is loaded, or in its place; no ticket of the steady state waits for one.
        config = replace(config, rollout=replace(config.rollout, text_encoder="offload"))
        model = replace(model, known=replace(model.known, text_parameters=0))
    tickets, chunk = config.rollout.tickets_per_batch, config.rollout.batch_size or config.images_per_ticket
    config = as_one_ticket(config)
    ledger = Ledger()
    with rehearsed_process(model, ledger, joined=False):
        worker = RolloutWorker(config, model.resolved, 0, "rollout-0")
        with ledger.phase("load"):
            worker.load()
        if config.rollout.text_encoder == "offload":
            ledger.moved(-model.text_bytes)
            ledger.phases["load"].peak -= model.text_bytes
        with ledger.phase("delivery"), ledger.aside() if config.versions_on_host else nullcontext():
            newest, arriving = deliver(worker, config)
        request = ticket_request(config, newest)
        _make_phases(ledger, worker, config, model, chunk)
        with ledger.phase("sample"):
            worker.generate([request])
        del arriving
        rows = config.rollout.batch_size or config.images_per_ticket
        chunks = -(-config.images_per_ticket // rows)
        return RolloutRehearsal(
            phases=ledger.phases,
            rows=rows,
            tickets=tickets,
            chunks=chunks,
            passes=chunks * config.rollout.num_inference_steps,
            run=chunks * STEPS,
            version_bytes=worker.receiver.layout.nbytes,
            vae_parameters=sum(part.numel() for part in worker.engine.policy.whole("plan").vae.parameters()),  # type: ignore[attr-defined]
        )


def as_one_ticket(config: Config) -> Config:
    """Returns a configuration whose tickets have the images of a batch of tickets, with as many forward passes."""
    tickets, images = config.rollout.tickets_per_batch, config.images_per_ticket
    if tickets == 1:
        return config
    rows = (config.rollout.batch_size or images) * tickets
    rollout = replace(config.rollout, tickets_per_batch=1, batch_size=rows)
    return replace(config, rollout=rollout, ticket_size=images * tickets)


def deliver(worker: RolloutWorker, config: Config) -> tuple[int, Any]:
    """Fills the receiver's slots for tickets and for an evaluation with zeros.

    Returns the newest version, and an object whose lifetime is that of the memory of a version that is arriving.
    """
    receiver, layout = worker.receiver, worker.receiver.layout
    data = np.zeros(layout.nbytes, np.uint8)
    digests = layout.digests(data)

    def header(stream: str, version: int) -> Header:
        return Draft(stream, version, layout, receiver.alpha, receiver.rank).sealed(digests)

    newest = config.live_versions
    for version in range(newest + 1):
        receiver.receive(header(POLICY, version), data, RING)
    receiver.receive(header(POLICY, newest), data, EVALUATION)
    return newest, receiver.expect(header(POLICY, newest))


def ticket_request(config: Config, version: int) -> RolloutRequest:
    prompts = [Prompt(0, "a prompt of usual length")]
    request = RequestBuilder(config, prompts, prompts).request(Ticket(TRAIN, 0, 0, 0, 0, version))
    return replace(
        request,
        noise_steps=(0,) if request.noise_steps else (),
        train_steps=(0,),
        sampling=replace(sampling(config), num_inference_steps=STEPS),
    )


def _make_phases(ledger: Ledger, worker: RolloutWorker, config: Config, model: FakeModel, chunk: int) -> None:
    # Makes forward passes, decoding and encoding of the worker's policy phases of their own, from now on.
    # Of a batch of tickets each ticket decodes its own chunks of `chunk` images. An offloaded text encoder counts as
    # device memory only while it encodes.
    policy: Any = worker.engine.policy  # type: ignore[attr-defined]
    encode = policy.encode
    offloaded = model.text_bytes if config.rollout.text_encoder == "offload" else 0

    def encoded(*args: Any, **options: Any) -> Any:
        with ledger.phase("encode"):
            ledger.moved(offloaded)
            try:
                return encode(*args, **options)
            finally:
                ledger.moved(-offloaded)

    policy.encode = encoded
    policy.velocity = _within(ledger, "denoise", policy.velocity)
    decode = _within(ledger, "decode", policy.decode)
    policy.decode = lambda latents, size: torch.cat([decode(part, size) for part in latents.split(chunk)])


def _within(ledger: Ledger, name: str, call: Any) -> Any:
    def called(*args: Any, **options: Any) -> Any:
        with ledger.phase(name):
            return call(*args, **options)

    return called
