"""Digests of the inputs of a run besides its configuration: the prompts, and the source files of the user's rewards.

Checkpoints hold these digests, so that a resume notices edited files (checkpoints.py).
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import RewardTerm, ServeConfig
from async_flowrl.data.store import digest_of
from async_flowrl.rewards.served import command_of
from async_flowrl.tickets.request import RequestBuilder

SERVER = ", or its server's command,"
"""Part of the sentences of `other_inputs`, after the name of the term."""


def inputs_of(requests: RequestBuilder) -> dict[str, Any]:
    """Returns the digests and counts of the prompts, and `reward_sources` of trained and held-out terms. Plain JSON."""
    return {
        "train": digest_of(requests.train),
        "train_prompts": len(requests.train),
        "evaluation": digest_of(requests.evaluation),
        "evaluation_prompts": len(requests.evaluation),
        "rewards": reward_sources(requests.config.reward.terms),
        "held_out_rewards": reward_sources(requests.config.evaluate.reward.terms),
    }


def reward_sources(terms: Mapping[str, RewardTerm]) -> dict[str, str]:
    """Returns term → SHA-256 (hex) of the source file of its `pkg.module:attr` and of its server's files.

    The server's part is its command, and the Python and requirements files (.txt) that the command names. Terms of this
    package without a server are left out.
    """
    sources = {}
    for key, term in terms.items():
        if parts := [*_own_file(term.name or key), *_server(term.serve)]:
            sources[key] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return sources


def _own_file(name: str) -> Iterator[bytes]:
    module, colon, _ = name.partition(":")
    spec = importlib.util.find_spec(module) if colon else None
    if spec is not None and spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin).read_bytes()


def _server(serve: ServeConfig | None) -> Iterator[bytes]:
    """Yields the server's command and files, which decide its scores as far as this process can see."""
    if serve is None:
        return
    for word in command_of(serve):
        yield word.encode()
        if word.endswith((".py", ".txt")) and os.path.isfile(word):
            yield Path(word).read_bytes()


def other_prompts(before: Mapping[str, Any], now: Mapping[str, Any], file: str) -> str | None:
    """Returns a sentence if the training prompts are not those of the checkpoint `before`, else None."""
    if before["train"] == now["train"]:
        return None
    counts = before["train_prompts"], now["train_prompts"]
    how = f"{counts[0]} before, {counts[1]} now" if counts[0] != counts[1] else f"still {counts[0]}"
    return f"the training prompts of data.train={file} are not those it was made with ({how})"


def other_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each difference that a resume only warns of."""
    phrases = []
    if before["evaluation"] != now["evaluation"]:
        phrases.append("the prompts of evaluations have changed, so that their curve breaks here")
    phrases += [
        f"the source file of the reward {term!r}{SERVER} has changed, so that scores may differ and its curve begins "
        "anew"
        for term in edited("rewards", before, now)
    ]
    return phrases + [
        f"the source file of the held-out reward {term!r}{SERVER} has changed, so that its curve begins anew"
        for term in edited("held_out_rewards", before, now)
    ]


def edited(kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the terms that both have and whose digests differ; none if an old checkpoint `before` lacks `kind`.

    `kind` is `rewards` or `held_out_rewards`, a key of `inputs_of`.
    """
    sources: Mapping[str, str] = before.get(kind, {})
    return sorted(term for term in sources.keys() & now[kind].keys() if sources[term] != now[kind][term])
