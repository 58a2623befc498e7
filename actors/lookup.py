"""Prompt lookup: propose what followed the same n-gram earlier in the sequence (no model).

The longest n-gram wins, then its latest occurrence. Copying runs on into the copy itself, so that
a repeating text is continued past its end. One index per sequence grows with the committed ids.
"""

from collections.abc import Iterable, Sequence

Gram = tuple[int, ...]


class PromptLookup:
    """N-gram indices of the sequences it was asked about."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[int, _Index] = {}

    def propose(self, sequence: int, committed: Sequence[int], num_ids: int) -> list[int]:
        """Up to `num_ids` ids that may follow `committed`; empty when no n-gram recurs."""
        index = self._indices.setdefault(sequence, _Index(self._sizes))
        index.extend(committed)
        copied_from = index.find(committed)
        if copied_from is None:
            return []
        text = list(committed[copied_from:])
        for i in range(num_ids):
            text.append(text[i])
        return text[len(committed) - copied_from :]

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop the indices of sequences that ended."""
        for sequence in sequences:
            self._indices.pop(sequence, None)

    def __len__(self) -> int:
        return len(self._indices)


class _Index:
    """Where each n-gram of one sequence was followed by something, latest first."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._after: dict[Gram, int] = {}  # n-gram -> index of the id that followed it
        self._length = 0

    def extend(self, committed: Sequence[int]) -> None:
        for end in range(self._length, len(committed)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(committed[end - size : end])] = end
        self._length = len(committed)

    def find(self, committed: Sequence[int]) -> int | None:
        for size in self._sizes:
            if size <= len(committed):
                found = self._after.get(tuple(committed[len(committed) - size :]))
                if found is not None:
                    return found
        return None
