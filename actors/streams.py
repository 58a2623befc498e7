"""The open requests: which sequences each holds, and where its deltas or its error go.

A thin shell around asyncio's queues: nothing here waits but the reader of a stream.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping

from outrider.actors.requests import Delta
from outrider.actors.sequence import Sequence


class Streams:
    """Every sequence that is not finished, failed or given up, and the stream it belongs to."""

    def __init__(self) -> None:
        self._alive: dict[int, Sequence] = {}
        self._stream: dict[int, _Stream] = {}  # by sequence

    def __len__(self) -> int:
        """Sequences alive."""
        return len(self._alive)

    @property
    def alive(self) -> Mapping[int, Sequence]:
        """The sequences by their ids; a live view."""
        return self._alive

    def open(self, sequences: list[Sequence]) -> AsyncIterator[list[Delta]]:
        """The deltas of a request's sequences, until the last of each or an error."""
        stream = _Stream(sequences)
        for sequence in sequences:
            self._alive[sequence.id] = sequence
            self._stream[sequence.id] = stream
        return stream

    def send(self, deltas: Iterable[tuple[Sequence, Delta]]) -> None:
        """Hand each stream its deltas of a round, in one item."""
        items: dict[_Stream, list[Delta]] = defaultdict(list)
        for sequence, delta in deltas:
            items[self._stream[sequence.id]].append(delta)
        for stream, item in items.items():
            stream.items.put_nowait(item)

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> list[Sequence]:
        """End the streams of sequences with an error; gives all that were alive in these."""
        streams = dict.fromkeys(s for s in map(self._stream.get, (q.id for q in sequences)) if s)
        for stream in streams:
            stream.items.put_nowait(error)
        return [s for stream in streams for s in self.living(stream.sequences)]

    def living(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those of sequences that are alive."""
        return [s for s in sequences if s.id in self._alive]

    def forget(self, ids: Iterable[int]) -> None:
        """Sequences ended, in whatever way; unknown ones are ignored."""
        for id in ids:
            self._alive.pop(id, None)
            self._stream.pop(id, None)


class _Stream:
    """One request being served."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self._num_open = len(sequences)
        self.items: asyncio.Queue[list[Delta] | Exception] = asyncio.Queue()

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> list[Delta]:
        if not self._num_open:
            raise StopAsyncIteration
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        self._num_open -= sum(delta.finish_reason is not None for delta in item)
        return item
