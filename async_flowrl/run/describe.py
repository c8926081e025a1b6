"""The first lines of a run and of dry_run: which prompts are trained and evaluated, and by which rewards."""

from async_flowrl.config.schema import RewardTerm
from async_flowrl.run.prepare import Prepared


def describe_inputs(prepared: Prepared) -> str:
    """Lines of a name and a sentence each."""
    terms = prepared.config.reward.terms
    rows = (
        ("training", training(prepared)),
        ("evaluation", evaluation(prepared)),
        ("reward", " + ".join(_term(key, term) for key, term in terms.items()).replace("+ -", "- ")),
    )
    return "".join(f"{name:10} {sentence}\n" for name, sentence in rows)


def training(prepared: Prepared) -> str:
    """The training prompts: how many, of which file, how they are drawn."""
    config, prompts = prepared.config.data, prepared.data.train
    said = [f"{_count(len(prompts))} of {prompts.rows.path}"]
    if prompts.duplicates:
        said.append(f"{prompts.duplicates:,} of them duplicates by their text")
    if prompts.rows.left_out:
        said.append(f"without the columns {', '.join(prompts.rows.left_out)}, which hold bytes")
    if config.weight_key is not None:
        said.append(f"drawn in proportion to {config.weight_key!r}")
    if config.curriculum.after is not None:
        said.append(f"set aside where the last {config.curriculum.after} of their groups had no spread of rewards")
    return ", ".join(said)


def evaluation(prepared: Prepared) -> str:
    """The prompts of evaluations, and whether they are held out."""
    chosen, shared = prepared.requests.evaluation, prepared.requests.shared
    if prepared.data.evaluation is prepared.data.train:
        return f"{len(chosen)} of {prepared.data.chosen}"
    if shared:
        return f"{_count(len(chosen))} {prepared.data.chosen}; {shared} of them are training prompts, so not held out"
    return f"{_count(len(chosen)).replace(' prompt', ' held-out prompt')}, {prepared.data.chosen}"


def _count(number: int) -> str:
    return f"{number:,} prompt{'' if number == 1 else 's'}"


def _term(key: str, term: RewardTerm) -> str:
    said = [term.name] if term.name not in (None, key) else []
    said += [] if term.required else ["not required"]
    return f"{term.weight:g} × {key}" + (f" ({', '.join(map(str, said))})" if said else "")
