"""The command `async-flowrl data FILE`: shows how a run reads a prompt file, and which rows it refuses."""

import argparse
import sys
from collections.abc import Sequence

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.paths import find_data
from async_flowrl.config.schema import DataConfig, RewardConfig
from async_flowrl.data.load import divided, evaluation_rows, open_split
from async_flowrl.data.prompts import Keys
from async_flowrl.data.show import Shown, page
from async_flowrl.data.store import Prompts, scan
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.types import EVALUATION, TRAIN


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page and returns the exit code: OK, or CONFIG if a run would refuse the file."""
    parser = argparse.ArgumentParser(prog="async-flowrl data", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="txt, jsonl, parquet, or a folder with splits")
    parser.add_argument("--split", choices=(TRAIN, EVALUATION), default=TRAIN, help="of a folder (default: train)")
    parser.add_argument("--prompt-key", default="prompt", help="data.prompt_key: the column of the prompt")
    parser.add_argument("--weight-key", help="data.weight_key: the column of the weight")
    parser.add_argument("--held-out", type=float, help="data.held_out: share that is evaluated instead of trained")
    parser.add_argument("--held-out-seed", type=int, default=0, help="data.held_out_seed")
    parser.add_argument("--reward", help="also refuse what this reward could not score: a group of configs/reward/")
    given = parser.parse_args(arguments)
    try:
        if given.held_out is not None and not 0 <= given.held_out < 1:
            raise ConfigError(f"--held-out must be at least 0 and below 1, got {given.held_out:g}")
        shown = look(given)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"async_flowrl: {error}\n")
        return exit_codes.CONFIG
    sys.stdout.write(page(shown))
    return exit_codes.CONFIG if shown.scan.refusals or not len(shown.scan.places) else exit_codes.OK


def look(given: argparse.Namespace) -> Shown:
    """Reads the whole file and keeps the refusals of its rows. Raises ValueError if it cannot be read at all."""
    reward = compose_config(overrides=[f"reward={given.reward}"]).reward if given.reward else RewardConfig()
    keys = Keys(given.prompt_key, given.weight_key, bool(given.reward) and check_rewards(reward))
    path = find_data(given.file, key="FILE", folder=True)
    rows = open_split(path, given.split, keys)
    scanned = scan(rows, keys, keep_refusals=True, check=prompt_check(reward))
    if given.split == EVALUATION or not len(scanned.places):
        return Shown(scanned, Prompts(scanned), None)
    settings = DataConfig(held_out=given.held_out, held_out_seed=given.held_out_seed)
    if (other := evaluation_rows(settings, path, keys)) is not None:
        return Shown(scanned, Prompts(scanned), None, f"of {other.path}")
    data = divided(settings, scanned)
    return Shown(
        scanned, data.train, *((None, "") if data.evaluation is data.train else (data.evaluation, data.chosen))
    )


if __name__ == "__main__":
    sys.exit(main())
