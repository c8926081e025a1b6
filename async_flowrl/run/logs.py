"""The log file of a run: opened when its directory exists, closed at its end."""

import logging
import os
from pathlib import Path


def log_to(path: Path) -> None:
    """Writes all log records to the file `path`, and warnings without a traceback to the terminal."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    console.addFilter(lambda record: record.exc_info is None)
    logging.basicConfig(level=logging.INFO, handlers=[handler, console], force=True)


def end_log(folder: Path) -> None:
    """Closes the log files in a folder, because the process may go on with something else or move the folder."""
    root, place = logging.getLogger(), os.path.abspath(folder)
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler) and os.path.dirname(handler.baseFilename) == place:
            root.removeHandler(handler)
            handler.close()
