"""Benchmark of deliveries between Ray actors, each compared with the bare transfer of its transport in the same run."""
