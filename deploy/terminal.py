"""What may reach a terminal: no control characters, and of what Ray writes, Outrider's own lines.

Ray forwards its workers' output to this process's stdout and stderr with a prefix such as
`(TargetWorker pid=7) `. The rest of it stays in Ray's log files.
"""

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any, TextIO, cast

_PREFIX = re.compile(
    r"(?:\x1b\[\d*m)*\((?:[^()]*\bpid=|raylet|autoscaler)[^()]*\)(?:\x1b\[\d*m)* ?"
)
_OWN = "outrider: "  # what cluster/logs.py begins its lines with


def printable(text: str) -> str:
    """The text, which may come from anyone, without what could steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return printable(" ".join(str(error).split()))


@contextlib.contextmanager
def only_own_lines(stdout: TextIO, stderr: TextIO, progress: TextIO) -> Iterator[None]:
    """While the context lasts, print Outrider's forwarded lines to `progress`, drop all others.

    What this process itself prints is not touched.
    """
    out, err = (cast(TextIO, _Filter(stream, progress)) for stream in (stdout, stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _Filter:
    """A text stream that looks at every line which Ray's forwarding thread prints."""

    def __init__(self, stream: TextIO, progress: TextIO) -> None:
        self._stream = stream
        self._progress = progress
        self._of_thread = threading.local()

    def write(self, text: str) -> int:
        # print() writes a text, then its end: the end of a forwarded line goes with the line.
        if text == "\n" and getattr(self._of_thread, "was_forwarded", False):
            self._of_thread.was_forwarded = False
            return len(text)
        prefix = _PREFIX.match(text)
        self._of_thread.was_forwarded = prefix is not None
        if prefix is None:
            return self._stream.write(text)
        line = text[prefix.end() :].rstrip("\n")
        if line.startswith(_OWN):
            print(line.removeprefix(_OWN), file=self._progress, flush=True)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
