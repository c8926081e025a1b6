"""The curves that evaluations draw, by the configuration alone: names, which of them is the best's, what is refused."""

from async_flowrl.config.messages import unknown_name
from async_flowrl.config.schema import Config

REWARD, DIVERSITY = "reward", "diversity"
"""The weighted sum that is trained on, and the mean distance of two images of a prompt."""


def curve_names(config: Config) -> list[str]:
    """The trained reward and its terms, and the held-out terms."""
    return [REWARD, *config.reward.terms, *config.evaluate.reward.terms]


def quality_terms(config: Config) -> list[str]:
    """Held-out terms that are judged by: those with a weight."""
    return [name for name, term in config.evaluate.reward.terms.items() if term.weight != 0]


def best_curve(config: Config) -> str | None:
    """By which curve the best version is kept: `save.best`, or where the alarm may end the run the first held-out term
    with a weight; None where none is kept."""
    if config.save.best is None and config.evaluate.on_hacking == "stop":
        return next(iter(quality_terms(config)), None)
    return config.save.best


def evaluation_due(config: Config, version: int) -> bool:
    """Before training if asked, every so many steps, and at the end."""
    if version == 0:
        return config.evaluate.before_training
    every = config.evaluate.every
    return version == config.total_steps or (every > 0 and version % every == 0)


def check_curves(config: Config) -> None:
    """Raises ValueError, one sentence, for a `save.best` that is no curve, and for what contradicts itself."""
    names, wanted = curve_names(config), config.save.best
    if wanted is not None and wanted not in names:
        raise ValueError(unknown_name("save.best", wanted, names))
    if config.evaluate.on_hacking == "stop" and not quality_terms(config):
        raise ValueError(
            "evaluate.on_hacking=stop needs a held-out term that says what is good: name one in evaluate.reward.terms, "
            "with a weight other than 0"
        )
    if config.evaluate.baseline and config.lora.path is not None:
        raise ValueError(
            f"evaluate.baseline=true evaluates the base model, but the run starts from lora.path={config.lora.path}: "
            "leave one of them out"
        )
