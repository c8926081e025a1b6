"""Deliveries between real processes, paired with the raw primitive in one run."""
