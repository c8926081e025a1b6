"""The digest of the bytes with which a receiver's network computes."""

from checkpoint_engine import Draft, Receiver


def live_digest(receiver: Receiver) -> str:
    """Returns the digest that the active version would have with the live bytes."""
    active = receiver.active
    assert active is not None
    draft = Draft(active.stream, active.version, receiver.layout, receiver.alpha, receiver.rank)
    return draft.sealed(draft.layout.digests(receiver.live.cpu().numpy())).digest
