"""Evaluation curves of a run, the curve that selects the best version, and the versions to be evaluated and saved."""

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.schema import Config

# The weighted sum that is trained on, and the mean distance between two images of a prompt.
REWARD, DIVERSITY = "reward", "diversity"


def quality_terms(config: Config) -> list[str]:
    """Returns the held-out terms with a weight other than 0, by which images are judged."""
    return [name for name, term in config.evaluate.reward.terms.items() if term.weight != 0]


def best_curve(config: Config) -> str | None:
    """Returns the name of the curve by which the best version is kept; None if none is kept."""
    # This is `save.best`. If it is null and evaluate.on_hacking=stop, it is the first held-out term with a weight.
    if config.save.best is None and config.evaluate.on_hacking == "stop":
        return next(iter(quality_terms(config)), None)
    return config.save.best


def evaluation_due(config: Config, version: int) -> bool:
    if version == 0:
        return config.evaluate.before_training
    every = config.evaluate.every
    return version == config.total_steps or (every > 0 and version % every == 0)


def check_curves(config: Config) -> None:
    """Raises ValueError, one sentence, if `save.best` is no curve, or if evaluation settings contradict each other."""
    names, best = [REWARD, *config.reward.terms, *config.evaluate.reward.terms], config.save.best
    if best is not None and best not in names:
        raise ValueError(unknown_name("save.best", best, names))
    if config.evaluate.on_hacking == "stop" and not quality_terms(config):
        term = "a held-out term that says what is good, in evaluate.reward.terms"
        raise ValueError(f"evaluate.on_hacking=stop needs {term}, with a weight other than 0")
    if config.evaluate.baseline and config.lora.path is not None:
        start = f"the run starts from lora.path={config.lora.path}"
        raise ValueError(f"evaluate.baseline=true evaluates the base model, but {start}: leave one of them out")


def checkpoint_due(config: Config, version: int) -> bool:
    """Returns True if `version` must have a checkpoint: every `save.every`-th, the last, and those that may be best."""
    # Where `save.every` is null, `Checkpoints.overdue` adds to it.
    every = config.save.every or 0
    evaluated = best_curve(config) is not None and evaluation_due(config, version)
    return evaluated or version == config.total_steps or (every > 0 and version % every == 0)
