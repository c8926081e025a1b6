"""What the engine and its pipeline call the things that travel between them."""

REQUEST = "rollout_request"
"""Key of the ticket among a request's extra arguments."""
ROLLOUT = "rollout"
"""Metadata group of the answer: {"active": what the network carried, "rollout": images and trajectory}."""
