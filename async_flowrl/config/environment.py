"""Checks of the environment variables that the configuration sets for the workers of a pool (`POOL.environment`)."""

from collections.abc import Mapping

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED")
_MALLOC = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_CACHE = ("HF_HOME", "HF_HUB_CACHE")
TAKEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "each worker is shown the GPUs of its seat (gpus_per_worker)",
    "CUBLAS_WORKSPACE_CONFIG": "it follows from deterministic",
    **dict.fromkeys(_THREADS, "it follows from the pool's threads"),
    **dict.fromkeys(_RANKS, "trainer ranks get it when they meet"),
    **dict.fromkeys(
        (*_START, *_MALLOC), "it is read when a process starts, before it could be set: export it where Ray is started"
    ),
    **dict.fromkeys(_CACHE, "all pools of a node share one cache of the hub: export it where Ray is started"),
}
"""Variable that a configuration must not set → the reason."""


def environment_refusal(key: str, environment: Mapping[str, str], backend: str) -> str | None:
    """Returns one sentence about what is wrong with a pool's environment; None if nothing is.

    `key` is the setting's name, for example rollout.environment; `backend` is runtime.backend.
    """
    if environment and backend == "local":
        return (
            f"{key} is for workers that are processes, got {', '.join(environment)} with runtime.backend=local, whose "
            "workers are threads of this process: export it instead"
        )
    for name, value in environment.items():
        if not name or set(name) & {"=", "\0"}:
            return f"{key} has no name of an environment variable: {name!r}"
        if name in TAKEN:
            return f"{key} cannot set {name}: {TAKEN[name]}"
        if value in ("True", "False"):
            return (
                f"{key}.{name} must be text, got {value}: write what is to be read, such as '1' or '{value.lower()}', "
                "in quotes"
            )
    return None
