"""Exit codes of the command-line programs."""

OK = 0
ERROR = 1
# The configuration, an argument or an input file was refused, or the hardware cannot run it.
CONFIG = 2
# Training finished, weights and summary are written, but an evaluation, picture, monitor or the report failed.
INCOMPLETE = 3
# evaluate.on_hacking=stop ended the run. Weights, best weights and summary are written; resume=auto goes on.
HACKING = 4
# SIGTERM or time_limit ended the run, after a checkpoint or before the first step. The number is EX_TEMPFAIL.
RESUMABLE = 75
# Ctrl-C ended the run, from the first step on after a checkpoint. The number is 128 + SIGINT.
INTERRUPTED = 130
