"""Progress of workers: log lines that Ray forwards to the terminal of whoever started it."""

import logging
import sys
from collections.abc import Callable


def log_to_terminal(level: int = logging.INFO) -> None:
    """Send this process's Outrider log to stderr (once), from `level` on, and all progress.

    Called by processes that Ray starts: nobody else sets up logging there.
    """
    logger = logging.getLogger("outrider")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("outrider: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logging.getLogger("outrider.progress").setLevel(logging.INFO)
        logger.propagate = False


def reporter(role: str) -> Callable[[str], None]:
    """A function that logs the progress of one worker."""
    logger = logging.getLogger("outrider.progress")
    return lambda message: logger.info("%s: %s", role, message)
