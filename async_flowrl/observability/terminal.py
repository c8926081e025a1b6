"""Output to stdout and stderr that works for terminals, files, pipes and pipes whose reader has ended."""

import io
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from async_flowrl.config import exit_codes

logger = logging.getLogger(__name__)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Ends this process with the exit code of `main`, the entry point of a verb; of Ctrl-C, with a line on stderr."""
    show_what_can_be_shown()
    # transformers asks for torchvision, and image processors here are Pillow's.
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
    try:
        try:
            code: Any = main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        say("async_flowrl: interrupted\n", sys.stderr)
        sys.exit(exit_codes.INTERRUPTED)
    except BrokenPipeError:
        reader = select.poll()
        reader.register(sys.stdout, 0)
        if not reader.poll(0):
            raise  # of a socket or a worker
        # Behind `| head`: what is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(exit_codes.ERROR)


def show_what_can_be_shown() -> None:
    """Makes stdout and stderr replace characters that their encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def refuse(reason: object, code: int = exit_codes.CONFIG) -> int:
    say(f"async_flowrl: {reason}\n", sys.stderr)
    return code


def say(text: str, stream: TextIO | None = None) -> None:
    # If the reader of a pipe has ended (e.g. `head`, or `tee` after Ctrl-C), the run goes on: this and all later output
    # to the stream is dropped, and a warning is logged.
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        logger.warning("nobody reads %s any more: the run goes on without it", stream.name)


def named_lines(rows: Sequence[tuple[str, object]], label: int) -> str:
    return "".join(f"{name:{label}} {sentence}\n" for name, sentence in rows)
