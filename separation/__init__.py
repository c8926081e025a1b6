"""Who runs where: pools of worker processes, placement and supervision. Knows nothing of RL."""
