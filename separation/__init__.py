"""Pools of worker processes: placement, calls, replacement and supervision. Knows nothing of RL."""
