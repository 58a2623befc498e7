"""The KV cache: rows of slots, where slot index == token position.

Every layer holds keys and values `[rows, kv_heads, max_len, head_dim]`, allocated by its first
update in the type, on the device and with the heads (a rank's own, under tensor parallelism) of
the keys that come. One length per row is kept on the host. Rollback sets the length: nothing
moves, and what lies beyond a length is never read before it is overwritten.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.actors.attention import current_pass


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False  # full length even under a sliding window: the attention cuts the window

    def __init__(self, num_rows: int, max_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows = num_rows
        self.max_len = max_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for states like these, `[1, kv_heads, tokens, head_dim]`."""
        # Zeros, not empty: padded attention multiplies slots it masks by 0, and 0 * NaN is NaN.
        self.keys, self.values = (
            states.new_zeros(self.num_rows, states.shape[1], self.max_len, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of the current pass to their slots; return the whole storage."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None, "initialised above"
        current_pass().write(self.keys, key_states)
        current_pass().write(self.values, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """0: positions are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Slots per row."""
        return self.max_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys, first key): only for masks that our attention does not use."""
        return self.max_len, 0


class RowCache(Cache):
    """`num_rows` independent sequences of up to `max_len` tokens each."""

    def __init__(self, num_layers: int, num_rows: int, max_len: int) -> None:
        self.row_layers = [RowLayer(num_rows, max_len) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))
        self.max_len = max_len
        self.lengths = [0] * num_rows

    @property
    def allocated_bytes(self) -> int:
        """Memory that keys and values occupy; 0 before the first pass."""
        tensors = [tensor for layer in self.row_layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def cut(self, row: int, length: int) -> None:
        """Roll `row` back to its first `length` tokens; an IndexError if it has fewer."""
        if not 0 <= length <= self.lengths[row]:
            raise IndexError(f"row {row} holds {self.lengths[row]} tokens: no cut to {length}")
        self.lengths[row] = length

    def begin(self, row: list[int], start: list[int], num_tokens: list[int]) -> None:
        """Roll each row back to `start[i]`, where `num_tokens[i]` more tokens are to be written.

        An IndexError, and nothing changed, if that leaves a gap or does not fit.
        """
        for index, first, count in zip(row, start, num_tokens, strict=True):
            if not 0 <= first <= self.lengths[index]:
                raise IndexError(f"row {index} holds {self.lengths[index]} tokens, not {first}")
            if first + count > self.max_len:
                raise IndexError(f"row {index} has {self.max_len} slots, not {first + count}")
        for index, first in zip(row, start, strict=True):
            self.lengths[index] = first

    def finish(self, row: list[int], num_tokens: list[int]) -> None:
        """Count the tokens that a pass has written."""
        for index, count in zip(row, num_tokens, strict=True):
            self.lengths[index] += count
