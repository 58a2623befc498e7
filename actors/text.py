"""The text of one answer as its ids arrive: whole characters, and nothing a stop string may claim.

`decode` turns ids into text (a tokenizer's). Some tokenizers decode an id by its neighbours
(leading spaces), so text is read off a window that begins with the prompt's end.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[list[int]], str]


class Detokenize(Protocol):
    """A tokenizer's decoding."""

    def __call__(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn ids into text."""
        ...


_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not (yet) a character
_CONTEXT_IDS = 6  # enough of the prompt to tell whether the first id follows a space


class TextStream:
    """Incremental detokenisation with stop strings.

    `matched` is the stop string that was completed, else None; after a match nothing is released.
    The text ends before that string, or with it if `include_stop`.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._may_stop = True
        self.matched: str | None = None
        context = list(prompt[-_CONTEXT_IDS:])
        text = decode(context)
        if text.endswith(_INCOMPLETE):
            context, text = [], ""  # the prompt ends inside a character: the answer stands alone
        self._ids = context
        self._window = 0  # decoding begins here
        self._read = len(context)  # the window's next beginning: a border between characters
        self._given = len(text)  # characters of the window's text that were read off already
        self._held = ""  # text that may still become a stop string

    def push(self, ids: Sequence[int], may_stop: bool = True) -> str:
        """Append ids and return the text that is certain now; how ids are grouped is no matter.

        With stop strings, push one id at a time: then the id that completes a match is known. What
        is completed while the text may not stop is no match.
        """
        # One by one: decoders read bytes by their neighbours, and a block must read as its ids do.
        return "".join([self._push(id, may_stop) for id in ids])

    def _push(self, id: int, may_stop: bool) -> str:
        if self.matched is not None:
            return ""
        self._ids.append(id)
        text = self._decode(self._ids[self._window :])
        self._may_stop = may_stop
        certain = text.rstrip(_INCOMPLETE)
        new = certain[self._given :]
        self._given += len(new)
        if new and certain == text:
            self._window, self._read = self._read, len(self._ids)
            self._given = len(self._decode(self._ids[self._window :]))
        return self._release(new)

    def flush(self) -> str:
        """Return what is held back, now that no more ids come; it may complete a stop string."""
        if self.matched is not None:
            return ""
        text = self._release(self._decode(self._ids[self._window :])[self._given :])
        text += self._held
        self._window = self._read = len(self._ids)
        self._given = 0
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        found = self._find(text, len(self._held)) if self._may_stop else None
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[: at + len(self.matched)] if self._include_stop else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first stop string that ends beyond the old characters, the longest of several."""
        found = []
        for stop in self._stop:
            at = text.find(stop, max(num_old + 1 - len(stop), 0))
            if at >= 0:
                found.append((at, -len(stop), stop))
        if not found:
            return None
        at, _, stop = min(found)
        return at, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0
