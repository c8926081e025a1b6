"""The program `async-flowrl serve-rewards reward=ocr [key=value ...] [--port 8000 ...]`: serves a reward over HTTP."""

import argparse
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from async_flowrl.config.check import ConfigError, check_fields
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.schema import RewardConfig
from async_flowrl.data.prompts import quoted_target
from async_flowrl.observability.terminal import refuse
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.call import Sources
from async_flowrl.rewards.model_weights import MissingPath
from async_flowrl.rewards.registry import build_reward
from async_flowrl.types import ByteArray, Prompt, Scores

PACKAGES = ("fastapi", "uvicorn", "python_multipart")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        check_packages()
    except ValueError as error:
        return refuse(error)
    from async_flowrl.cli import reward_server as server

    parser = argparse.ArgumentParser(
        prog="async-flowrl serve-rewards", description="Serves the reward of a configuration over HTTP."
    )
    parser.add_argument("--config-name", "-cn", default=DEFAULT)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="reward=ocr, reward.terms.x.weight=2 …")
    server.add_arguments(parser)
    options = parser.parse_intermixed_args(argv)
    try:
        server.settings_of(options)
        config = compose_config(options.config_name, options.overrides, options.config_dir).reward
        check_fields(config, "reward.")
        score = scorer(config)
        here = ("localhost", server.LOOPBACK, "0.0.0.0")
        own = {f"http://{host}:{options.port}" for host in (here if options.host in here else [options.host])}
        for name, term in config.terms.items():
            url = term.options.get("url")
            if any(str(each).rstrip("/") in own for each in (url if isinstance(url, list) else [url])):
                raise ConfigError(f"reward.terms.{name}.options.url is that of this server: choose another --port")
        return server.serve(score, options, ", ".join(config.terms))
    except (ConfigError, server.ServeError, ValueError) as error:
        return refuse(error)


def check_packages() -> None:
    """Raises ValueError, with what to install, if a package is missing."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"serve-rewards needs {', '.join(missing)}: pip install 'async-flowrl[serve]'")


def scorer(config: RewardConfig) -> Callable[..., Awaitable[Sequence[object]]]:
    """Returns the weighted sum of a configuration as one async function (images, prompt, sources) → results.

    Raises ValueError if the reward cannot be built, or if a term has `serve`, since only runs start servers.
    """
    if served := [name for name, term in config.terms.items() if term.serve is not None]:
        raise ValueError(f"reward.terms.{served[0]}.serve: servers are started by runs; give its command to a shell")
    reward = build_reward(config)
    executor = ThreadPoolExecutor(max(8, len(reward.terms)), thread_name_prefix="score")

    async def score(images: ByteArray, prompt: Prompt, sources: Sources | None = None) -> Sequence[object]:
        target_prompt = replace(prompt, target=prompt.target or quoted_target(prompt.text))
        if reward.needs_target and not target_prompt.target:
            raise PromptRefused(
                f"the reward needs a target, but {prompt.text!r:.80} has none, also not in double quotes"
            )
        try:
            reward.check([target_prompt])
        except ValueError as error:
            if isinstance(error.__cause__, MissingPath):
                raise
            raise PromptRefused(str(error)) from error
        return results(await reward.score(target_prompt, images, executor, sources), config)

    score.video = True  # type: ignore[attr-defined]
    score.images = not any(term.video for term in reward.terms)  # type: ignore[attr-defined]
    score.sources = any(term.sources for term in reward.terms)  # type: ignore[attr-defined]
    return score


def results(scores: Scores, config: RewardConfig) -> list[dict[str, float | str]]:
    """Returns per image the weighted sum under `score`, and as extras every term's score and its extras.

    A single term of weight 1 adds no score of its own, and its extras keep their names.
    """
    alone = len(config.terms) == 1 and next(iter(config.terms.values())).weight == 1.0
    columns: dict[str, tuple[float | str, ...]] = {} if alone else dict(scores.by_term)
    for term, extras in scores.extras.items():
        columns |= {name if alone else f"{term}.{name}": values for name, values in extras.items()}
    return [
        {"score": total, **{name: values[image] for name, values in columns.items()}}
        for image, total in enumerate(scores.total)
    ]
