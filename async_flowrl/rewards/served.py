"""Reward terms whose server the run starts (`reward.terms.X.serve`): checks, the command line and the addresses."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from async_flowrl.config.schema import Config, RewardTerm, ServeConfig

PLACEHOLDERS = ("{port}", "{host}", "{token_file}")
HTTP_NAME = "http"


@dataclass(frozen=True)
class Addresses:
    """The URLs of a term's servers, and the token that they require (None for none). Picklable."""

    urls: tuple[str, ...]
    token: str | None = None


class Connecting(Protocol):
    """A reward that asks servers."""

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        """Replaces the URLs and the token that the reward uses."""
        ...


def served_terms(config: Config) -> Iterator[tuple[str, ServeConfig]]:
    """Yields (term name, server settings) for the trained and the held-out terms; no name occurs in both."""
    for terms in (config.reward.terms, config.evaluate.reward.terms):
        for name, term in terms.items():
            if term.serve is not None:
                yield name, term.serve


def server_pool(term: str) -> str:
    """Returns the name of the pool of a term's servers."""
    return f"server/{term}"


def term_key(config: Config, term: str) -> str:
    """Returns the key of a term's section: `evaluate.reward.terms.X` for a held-out term, else `reward.terms.X`."""
    return f"{'evaluate.' if term in config.evaluate.reward.terms else ''}reward.terms.{term}"


def is_needed(config: Config, term: str) -> bool:
    """Returns True if a run cannot continue without the term's servers, because the term is trained on and required."""
    return term in config.reward.terms and config.reward.terms[term].required


def check_serve(where: str, term: RewardTerm, attribute: object) -> None:
    """Checks the server of a term; `attribute` is the term's class or function.

    Raises ValueError if the server cannot be started, or if the reward would not use it.
    """
    wanted: tuple[str, str] | None = getattr(attribute, "wants_server", None)
    option, example = wanted or ("url", "")
    if term.serve is None:
        if wanted and not term.options.get(option):
            raise ValueError(
                f"{where}: the {term.name or where.rpartition('.')[2]} reward needs options.{option}, for example "
                f"{example}, or {where}.serve for a server that the run starts itself"
            )
        return
    if not hasattr(attribute, "connect"):
        raise ValueError(
            f"{where}.serve: {term.name} asks no server; leave the name out for the http reward, or name one that has "
            "connect(urls, token)"
        )
    if term.options.get(option):
        raise ValueError(
            f"{where}: options.{option} and serve exclude each other; serve says where its servers are itself"
        )
    _check_command(f"{where}.serve", term.serve)


def _check_command(where: str, serve: ServeConfig) -> None:
    words = command_of(serve)
    if not words:
        raise ValueError(f"{where}.command must be a text, or a list of texts, got {serve.command!r}")
    if not serve.health.startswith("/"):
        raise ValueError(f"{where}.health must be a path such as /health, got {serve.health!r}")
    named = any("{port}" in word for word in words)
    if not named and serve.port is None:
        raise ValueError(f"{where}.command must contain {{port}}, unless {where}.port is the one that it listens at")
    if not named and serve.replicas > 1:
        raise ValueError(f"{where}.command must contain {{port}}: each of the replicas listens at its own")
    if 1 < serve.gpus != int(serve.gpus):
        raise ValueError(f"{where}.gpus above 1 must be a whole number, got {serve.gpus:g}")


def command_of(serve: ServeConfig) -> list[str]:
    """Returns the words of the command; empty if it is neither a text nor a list of texts."""
    given = serve.command
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError:
            return []
    if isinstance(given, Sequence) and all(isinstance(word, str) for word in given):
        return list(given)
    return []


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replaces `{port}` and the other names in `values`. Other braces stay, because commands may contain JSON."""
    replaced = []
    for word in words:
        for name, value in values.items():
            word = word.replace("{" + name + "}", value)
        replaced.append(word)
    return replaced
