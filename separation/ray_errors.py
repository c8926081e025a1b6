"""Errors of Ray: those that mean a worker's death, and what the others mean for whoever called the worker."""

from ray import exceptions

from separation.group import RefLost, WorkerFailed
from separation.host import RemoteError

DEATHS = (
    exceptions.RayActorError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.ActorUnschedulableError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
)
"""Errors of Ray that mean that the actor's process or its node has ended."""


def translate(error: BaseException, worker: str, method: str) -> BaseException:
    """Returns Ray's `error` as RefLost or WorkerFailed; other errors are returned unchanged."""
    cause = getattr(error, "cause", None) or error
    if isinstance(error, exceptions.ObjectLostError) or isinstance(cause, exceptions.ObjectLostError):
        return RefLost(f"a value needed by {worker}.{method} is gone: {one_line(cause)}")
    if not isinstance(error, exceptions.RayTaskError):
        return error
    remote = cause if isinstance(cause, RemoteError) else RemoteError(type(cause).__name__, str(cause), str(error))
    return WorkerFailed(worker, method, remote.kind, remote.message, remote.remote_traceback)


def one_line(error: BaseException) -> str:
    """Returns the cause in a message of Ray's, on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    for start in ("The actor is dead because ", "Worker exit detail: "):
        if start in text:
            text = text[text.index(start) + len(start) :]
    text = text.split(" Some common causes include")[0]
    return text[:300]
