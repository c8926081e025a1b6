"""Process exit codes."""

OK = 0
ERROR = 1
CONFIG = 2
INCOMPLETE = 3
"""Training is done, LoRA and summary are written, but an evaluation, a picture, a monitor or the report failed."""
RESUMABLE = 75
"""EX_TEMPFAIL: stopped by SIGTERM or time_limit with a checkpoint; start again with resume=auto."""
INTERRUPTED = 130
