"""Inputs of a run besides its configuration: prompts and the sources of rewards of one's own, by their digests.

A checkpoint holds them, so that a resume with an edited file is told from one with the same.
"""

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import RewardTerm
from async_flowrl.data.store import digest_of
from async_flowrl.tickets.request import RequestBuilder


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
    """Term → SHA-256 of the file that its `pkg.module:attr` is in; terms that ship with this package have none here."""
    sources = {}
    for key, term in terms.items():
        module, colon, _ = (term.name or key).partition(":")
        spec = importlib.util.find_spec(module) if colon else None
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            sources[key] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return sources


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
        f"the source file of the reward {term!r} has changed, so that scores may differ and its curve begins anew"
        for term in edited("rewards", before, now)
    ]
    return phrases + [
        f"the source file of the held-out reward {term!r} has changed, so that its curve begins anew"
        for term in edited("held_out_rewards", before, now)
    ]


def edited(kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Terms of both whose source files differ. A checkpoint may be older than one of the kinds."""
    sources: Mapping[str, str] = before.get(kind, {})
    return sorted(term for term in sources.keys() & now[kind].keys() if sources[term] != now[kind][term])
