"""Names of the two pools that every run has; those of reward workers are in config/reward_pools.py."""

ROLLOUT, TRAINER = "rollout", "trainer"
