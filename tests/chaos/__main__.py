"""`python -m tests.chaos fault_schedules 0 352` runs the schedules of these seeds and prints what was hit."""

import importlib
import sys
from collections import Counter

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    schedules = importlib.import_module(f"tests.chaos.{sys.argv[1]}")
    ended = [schedules.outcome(seed) for seed in range(int(sys.argv[2]), int(sys.argv[3]))]
    hits = Counter(hit for each in ended for hit in each.hits)
    for place, fault in schedules.PAIRS:
        print(f"{place:32} {fault:16} {hits[place, fault]:5}")
    print(f"{len(ended)} schedules:", dict(Counter(each.how for each in ended)))
    for each in ended:
        if each.wrong:
            print(f"seed {each.seed}: {each.wrong}")
