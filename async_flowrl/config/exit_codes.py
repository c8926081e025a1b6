"""Process exit codes."""

OK = 0
ERROR = 1
CONFIG = 2
INCOMPLETE = 3
"""Training is done, its weights and summary are written, but an evaluation, a picture, a monitor or the report
failed."""
HACKING = 4
"""Stopped by evaluate.on_hacking=stop, in order: the weights, the best ones and summary are written, and resume=auto
goes on."""
RESUMABLE = 75
"""EX_TEMPFAIL: stopped by SIGTERM or time_limit with a checkpoint; start again with resume=auto."""
INTERRUPTED = 130
