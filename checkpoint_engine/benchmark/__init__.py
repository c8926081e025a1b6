"""Benchmark of deliveries between Ray actors, each paired with the raw primitive of its transport in one run."""
