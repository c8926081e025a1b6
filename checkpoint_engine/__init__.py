"""Versioned tensor transfer with proof of delivery. Knows nothing of RL, diffusion or Ray."""
