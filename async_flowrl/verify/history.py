"""Checks of a run's history: its events and its metrics.

Each check returns its finding in words, and raises Broken if the files contradict the guarantee.
"""

import re
from collections import Counter
from pathlib import Path

from async_flowrl.config.compose import read_config
from async_flowrl.config.messages import first_line
from async_flowrl.data.load import load_data
from async_flowrl.types import EVALUATION, TRAIN
from async_flowrl.verify.files import FINAL_STATES, Broken, RunFiles


def bound(run: RunFiles) -> str:
    """Checks that each trained sample has the version that its step names, and is not older than max_staleness."""
    ages: Counter[int] = Counter()
    for event in run.finished:
        age = event["step"] - event["version"]
        if not 0 <= age <= run.max_staleness:
            raise Broken(f"ticket {event['ordinal']} of step {event['step']} is {age} versions old")
        if age != min(event["step"], run.max_staleness):
            raise Broken(f"ticket {event['ordinal']} of step {event['step']} was made with version {event['version']}")
        ages[age] += 1
    for line in run.metrics:
        if (line.get("staleness/max") or 0) > run.max_staleness:
            raise Broken(f"metrics.jsonl says staleness {line['staleness/max']} at step {line['step']}")
    return ", ".join(f"{count} tickets of age {age}" for age, count in sorted(ages.items()))


def exactly_once(run: RunFiles) -> str:
    """Checks that every ticket was trained or skipped once, in the step that its number names, step after step."""
    ordinals = [event["ordinal"] for event in run.finished]
    twice = [ordinal for ordinal, count in Counter(ordinals).items() if count > 1]
    if twice:
        raise Broken(f"tickets {sorted(twice)[:5]} were finished more than once")
    missing = sorted(set(range(max(ordinals, default=-1) + 1)) - set(ordinals))
    if missing:
        raise Broken(f"tickets {missing[:5]} were never finished")
    per_step = Counter(event["step"] for event in run.finished)
    if sorted(per_step) != list(range(run.steps)) or len(set(per_step.values())) > 1:
        raise Broken(f"{run.steps} steps should have equally many tickets, have {dict(sorted(per_step.items()))}")
    if per_step:
        _one_step_after_the_other(run, per_step[0])
    if [line["step"] for line in run.metrics] != list(range(run.steps)):
        raise Broken(f"metrics.jsonl has not one line for each of {run.steps} steps")
    skipped = sum(event["state"] == "SKIPPED" for event in run.finished)
    return f"{len(ordinals)} tickets in {run.steps} steps" + (f", {skipped} of them skipped" if skipped else "")


def _one_step_after_the_other(run: RunFiles, per_step: int) -> None:
    """Raises Broken if a ticket was handed to the trainer before all tickets of the step before were finished."""
    ended: Counter[int] = Counter()
    last: dict[int, str] = {}
    for event in run.history:
        if event["event"] != "ticket" or event["kind"] != TRAIN:
            continue
        ordinal, step, state = event["ordinal"], event["step"], event["state"]
        if ordinal // per_step != step:
            raise Broken(f"ticket {ordinal} belongs to step {ordinal // per_step}, and stands in step {step}")
        if state == "HANDED" and step and ended[step - 1] != per_step:
            raise Broken(f"ticket {ordinal} of step {step} was handed over before step {step - 1} had ended")
        if state in FINAL_STATES:
            if last.get(ordinal) != "HANDED":
                raise Broken(f"ticket {ordinal} was finished without having been handed over")
            ended[step] += 1
        last[ordinal] = state


def version_chain(run: RunFiles) -> str:
    """Checks that every version has one digest in all attempts, and that acknowledgements and samples have it."""
    for (stream, version), digests in sorted(run.sent.items()):
        if len(digests) > 1:
            raise Broken(f"version {version} of {stream} was sent with {len(digests)} different digests")
    versions = {version for stream, version in run.sent if stream == "policy"}
    lacking = sorted(set(range(run.steps + 1)) - versions)
    if lacking:
        raise Broken(f"versions {lacking[:5]} were never sent")
    acknowledged = 0
    for event in run.history:
        if event["event"] == "version" and event["state"] == "acknowledged":
            acknowledged += 1
            if {event["digest"]} != run.sent.get((event["stream"], event["version"])):
                raise Broken(f"{event['worker']} acknowledged other bytes as version {event['version']} than were sent")
    for event in run.history:
        if event["event"] == "ticket" and event["state"] in FINAL_STATES:
            streams = ("policy",) if event["kind"] == TRAIN else ("policy", "ema")
            if not any(event["digest"] in run.sent.get((stream, event["version"]), ()) for stream in streams):
                kind = "evaluation ticket" if event["kind"] == EVALUATION else "ticket"
                raise Broken(f"{kind} {event['ordinal']} was made with weights never sent as {event['version']}")
    return f"{len(versions)} versions, {acknowledged} acknowledgements"


def inputs(run: RunFiles) -> str:
    """Checks that all attempts trained on the same prompts and no resume was forced; also compares the prompt file."""
    attempts = [event for event in run.history if event["event"] == "inputs"]
    if not attempts:
        raise Broken("events.jsonl does not say which prompts were trained")
    for event in attempts:
        if event["forced"]:
            raise Broken(f"resume=force: {'; '.join(event['forced'])}")
    if len(digests := {event["train"] for event in attempts}) > 1:
        raise Broken(f"{len(digests)} different sets of prompts were trained, one after the other")
    last = attempts[-1]
    return f"{last['train_prompts']} training prompts, {prompts_now(run.root, last['train'])}"


def prompts_now(root: Path, digest: str) -> str:
    """Returns in words whether the prompt file is still that of the run. Reads prompts, and imports no reward."""
    try:
        config = read_config(root / "config.yaml")
        data = load_data(config.data, needs_target=False)
    except (ValueError, OSError) as error:
        return f"whose file cannot be compared here: {first_line(error)}"
    return f"data.train={config.data.train} {'is unchanged' if data.train.digest == digest else 'was edited since'}"


def reward_terms(run: RunFiles) -> str:
    """Checks that each group trained without an optional term is counted both in events.jsonl and in metrics.jsonl."""
    named = Counter((event["step"], event["term"]) for event in run.history if event["event"] == "unscored")
    counted = Counter(
        {
            (line["step"], key.split("/")[1]): int(value)
            for line in run.metrics
            for key, value in line.items()
            if re.fullmatch("reward/[^/]+/missing", key) and value
        }
    )
    steps = {line["step"] for line in run.metrics}
    if differing := sorted({key for key in named | counted if named[key] != counted[key] and key[0] in steps}):
        step, term = differing[0]
        raise Broken(
            f"step {step} was trained without the term {term} in {counted[step, term]} groups by metrics.jsonl, in "
            f"{named[step, term]} by events.jsonl"
        )
    by_term: Counter[str] = Counter()
    for (_, term), count in counted.items():
        by_term[term] += count
    lacking = ", ".join(f"{count} groups without the term {term}" for term, count in sorted(by_term.items()))
    return lacking or "every group with all its terms"
