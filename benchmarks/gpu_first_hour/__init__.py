"""The first hour on one GPU: stages with limits, for a machine that is at hand for minutes (docs/gpu_first_hour.md)."""
