"""Inputs of a run besides its configuration: prompts and the sources of rewards of one's own, by their digests.

A checkpoint holds them, so that a resume with an edited file is told from one with the same.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import RewardTerm, ServeConfig
from async_flowrl.data.store import digest_of
from async_flowrl.rewards.served import command_of, requirements_of
from async_flowrl.tickets.request import RequestBuilder

SERVER = ", or its server's command,"
"""In a sentence behind a term whose source has changed."""


def inputs_of(requests: RequestBuilder) -> dict[str, Any]:
    """Digests and counts of the prompts, and the digest of each own reward's source file by term. Plain JSON."""
    return {
        "train": digest_of(requests.train),
        "train_prompts": len(requests.train),
        "evaluation": digest_of(requests.evaluation),
        "evaluation_prompts": len(requests.evaluation),
        "rewards": reward_sources(requests.config.reward.terms),
        "held_out_rewards": reward_sources(requests.config.evaluate.reward.terms),
    }


def reward_sources(terms: Mapping[str, RewardTerm]) -> dict[str, str]:
    """Term → SHA-256 of the file that its `pkg.module:attr` is in, and of its server's command, Python files and
    requirements; terms that ship with this package and have no server have none here."""
    sources = {}
    for key, term in terms.items():
        if parts := [*_own_file(term.name or key), *_server(key, term.serve)]:
            sources[key] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return sources


def _own_file(name: str) -> Iterator[bytes]:
    module, colon, _ = name.partition(":")
    spec = importlib.util.find_spec(module) if colon else None
    if spec is not None and spec.origin and Path(spec.origin).is_file():
        yield Path(spec.origin).read_bytes()


def _server(key: str, serve: ServeConfig | None) -> Iterator[bytes]:
    """What decides its scores, as far as it can be seen from here."""
    if serve is None:
        return
    for word in command_of(serve):
        yield word.encode()
        if word.endswith(".py") and os.path.isfile(word):
            yield Path(word).read_bytes()
    if (requirements := requirements_of(key, serve)) is not None:
        yield requirements.read_bytes()


def other_prompts(before: Mapping[str, Any], now: Mapping[str, Any], file: str) -> str | None:
    """One sentence where the training prompts are not those of the checkpoint."""
    if before["train"] == now["train"]:
        return None
    counts = before["train_prompts"], now["train_prompts"]
    how = f"{counts[0]} before, {counts[1]} now" if counts[0] != counts[1] else f"still {counts[0]}"
    return f"the training prompts of data.train={file} are not those it was made with ({how})"


def other_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each difference that no resume is refused for."""
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
    """Terms of both whose source files differ. A checkpoint may be older than one of the kinds."""
    sources: Mapping[str, str] = before.get(kind, {})
    return sorted(term for term in sources.keys() & now[kind].keys() if sources[term] != now[kind][term])
