"""Process exit codes."""

OK = 0
ERROR = 1
CONFIG = 2
RESUMABLE = 75
"""EX_TEMPFAIL: stopped by SIGTERM or time_limit with a checkpoint; start again with resume=auto."""
INTERRUPTED = 130
