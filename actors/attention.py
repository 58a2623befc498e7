"""Attention of one pass over ragged rows of the KV cache: tokens packed as `[1, sum(n_i)]`.

A pass is a list of blocks: `n` tokens of one row from slot `start` on. Each token attends to the
slots of its own row up to its own position, or to the last `window` of them. Blocks run one by one
on a view of their row, or (padded: fewer kernel launches, for GPUs) the short ones together.
Models reach it through transformers' attention interface, under the name `ATTENTION`; the current
pass travels in a context variable, for not every architecture hands keyword arguments down.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# transformers looks for "sdpa", "flash" and "eager" within the name and then asks the model for
# capabilities that are not needed here.
ATTENTION = "outrider_rows"
LONGEST_PADDED = 32  # tokens; a longer block (a prefill chunk) would waste padding on the others


class Block(NamedTuple):
    """Tokens of one row from slot `start` on; the first is token `offset` of the pass."""

    row: int
    start: int
    num_tokens: int
    offset: int

    @property
    def end(self) -> int:
        """One after the block's last slot."""
        return self.start + self.num_tokens

    @property
    def tokens(self) -> slice:
        """The block's tokens among those of the pass."""
        return slice(self.offset, self.offset + self.num_tokens)


@dataclass(frozen=True)
class LayerKind:
    """How one layer attends, beside the scores: what its model passes to the interface."""

    scaling: float | None = None  # None = 1 / sqrt(head_dim)
    window: int | None = None  # a token sees this many slots, its own included; None = all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [heads], a score per head that takes weight, gives nothing


class Group:
    """Blocks that run together, padded to the longest: their tokens, slots and positions."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.longest = max(block.num_tokens for block in blocks)
        self.end = max(block.end for block in blocks)
        self.rows = [block.row for block in blocks]
        steps = torch.arange(self.longest)
        counts = torch.tensor([block.num_tokens for block in blocks])[:, None]
        # Padding repeats a block's last token: it attends like that one, then is left out.
        steps = torch.minimum(steps, counts - 1)
        starts = torch.tensor([block.start for block in blocks])[:, None]
        offsets = torch.tensor([block.offset for block in blocks])[:, None]
        real = torch.arange(self.longest) < counts
        self.tokens = (offsets + steps).to(device)  # [blocks, longest]
        self.positions = (starts + steps).to(device)  # [blocks, longest]
        self.real = real.flatten().nonzero()[:, 0].to(device)  # [tokens], within [blocks * longest]
        self.real_tokens = (offsets + steps)[real].to(device)  # [tokens]
        self.row_index = torch.tensor(self.rows).to(device)

    def select(self, storage: torch.Tensor) -> torch.Tensor:
        """`[blocks, kv_heads, end, head_dim]` of the storage; a view where the rows allow it."""
        first = self.rows[0]
        if self.rows == list(range(first, first + len(self.rows))):
            return storage[first : first + len(self.rows), :, : self.end]
        return storage[:, :, : self.end].index_select(0, self.row_index)


class Pass:
    """One pass of a model over blocks of distinct rows."""

    def __init__(
        self, row: Sequence[int], start: Sequence[int], num_tokens: Sequence[int], padded: bool
    ) -> None:
        offsets = [0, *accumulate(num_tokens)]
        self.blocks = [
            Block(*block) for block in zip(row, start, num_tokens, offsets, strict=False)
        ]
        self.padded = padded
        self.windows: list[int | None] = []  # of the layers, in the order they attended
        self._masks: dict[tuple[object, ...], torch.Tensor] = {}
        self._groups: dict[torch.device, Group] = {}
        self._slots: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def _together(self) -> list[Block]:
        short = [block for block in self.blocks if block.num_tokens <= LONGEST_PADDED]
        return sorted(short) if self.padded and len(short) > 1 else []

    @cached_property
    def _alone(self) -> list[Block]:
        together = set(self._together)
        return [block for block in self.blocks if block not in together]

    def write(self, storage: torch.Tensor, states: torch.Tensor) -> None:
        """Copy `[1, kv_heads, tokens, head_dim]` to the blocks' slots of a layer's storage."""
        if not self.padded:
            for block in self.blocks:
                storage[block.row, :, block.start : block.end] = states[0, :, block.tokens]
            return
        # A padded group multiplies what lies beyond a row's length by 0: a new sequence must not
        # meet the NaN or infinity that an earlier one may have left there.
        for block in self.blocks:
            if block.start == 0:
                storage[block.row].zero_()
        rows, slots = self._slots_on(storage.device)
        storage[rows, :, slots] = states[0].transpose(0, 1)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: LayerKind
    ) -> torch.Tensor:
        """`[1, tokens, heads, value_dim]` for `query` `[1, heads, tokens, head_dim]`.

        `keys` and `values` are a layer's whole storage, in which the pass's own states stand.
        """
        self.windows.append(kind.window)
        out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])
        for block in self._alone:
            low = max(0, block.start + 1 - kind.window) if kind.window else 0
            out[:, block.tokens] = _attend(
                query[:, :, block.tokens],
                keys[block.row : block.row + 1, :, low : block.end],
                values[block.row : block.row + 1, :, low : block.end],
                self._block_mask(block, low, query, keys, kind.window),
                kind,
            )
        if self._together:
            group = self._group_on(query.device)
            together = _attend(
                query[0, :, group.tokens].transpose(0, 1),
                group.select(keys),
                group.select(values),
                self._group_mask(group, query, keys, kind.window),
                kind,
            )
            out[0, group.real_tokens] = together.flatten(0, 1)[group.real]
        return out

    def _block_mask(
        self, block: Block, low: int, query: torch.Tensor, keys: torch.Tensor, window: int | None
    ) -> torch.Tensor | None:
        if block.num_tokens == 1:
            return None  # the view is exactly what the token may see
        groups = query.shape[1] // keys.shape[1]
        key = (block, window, groups, query.dtype, query.device)
        if key not in self._masks:
            positions = torch.arange(block.start, block.end, device=query.device)
            slots = torch.arange(low, block.end, device=query.device)
            self._masks[key] = _mask(positions[None], slots, window, groups, query.dtype)
        return self._masks[key]

    def _group_mask(
        self, group: Group, query: torch.Tensor, keys: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        groups = query.shape[1] // keys.shape[1]
        key = (window, groups, query.dtype, query.device)
        if key not in self._masks:
            slots = torch.arange(group.end, device=query.device)
            self._masks[key] = _mask(group.positions, slots, window, groups, query.dtype)
        return self._masks[key]

    def _group_on(self, device: torch.device) -> Group:
        if device not in self._groups:
            self._groups[device] = Group(self._together, device)
        return self._groups[device]

    def _slots_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._slots:
            rows = [block.row for block in self.blocks for _ in range(block.num_tokens)]
            slots = [slot for block in self.blocks for slot in range(block.start, block.end)]
            self._slots[device] = (
                torch.tensor(rows).to(device),
                torch.tensor(slots).to(device),
            )
        return self._slots[device]


def _mask(
    positions: torch.Tensor,
    slots: torch.Tensor,
    window: int | None,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive mask `[blocks, 1, groups * tokens, slots]` of positions `[blocks, tokens]`."""
    visible = slots <= positions[..., None]
    if window:
        visible &= slots > positions[..., None] - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=slots.device)
    # Additive, for a boolean mask would be converted again in every layer.
    return mask.masked_fill_(~visible, float("-inf")).repeat(1, groups, 1)[:, None]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    kind: LayerKind,
) -> torch.Tensor:
    """`[blocks, tokens, heads, value_dim]` for `query` `[blocks, heads, tokens, head_dim]`.

    Query heads that share a key-value head are folded into its tokens: no key is repeated.
    """
    blocks, heads, tokens, head_dim = query.shape
    kv_heads = keys.shape[1]
    folded = query.reshape(blocks, kv_heads, heads // kv_heads * tokens, head_dim)
    if kind.softcap is None and kind.sinks is None:
        out = scaled_dot_product_attention(folded, keys, values, mask, scale=kind.scaling)
    else:
        out = _attend_plainly(folded, keys, values, mask, kind)
    return out.reshape(blocks, heads, tokens, -1).transpose(1, 2)


def _attend_plainly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    kind: LayerKind,
) -> torch.Tensor:
    """Attention with soft-capped scores (Gemma 2) and sinks (gpt-oss), which no kernel offers."""
    scaling = kind.scaling if kind.scaling is not None else query.shape[-1] ** -0.5
    scores = query @ keys.transpose(2, 3) * scaling
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if mask is not None:
        scores = scores + mask
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores).view(query.shape[1], -1)
        sinks = sinks.repeat_interleave(query.shape[2] // sinks.shape[1], dim=1)
        scores = torch.cat([scores, sinks.expand(len(query), -1, -1)[..., None]], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return weights[..., : keys.shape[2]] @ values


_current: ContextVar[Pass] = ContextVar("outrider_pass")


def current_pass() -> Pass:
    """The pass that runs now; a LookupError outside of `running`."""
    return _current.get()


@contextmanager
def running(current: Pass) -> Iterator[None]:
    """Make `current` the pass that cache and attention see."""
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind `ATTENTION`; transformers fixes its signature."""
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} brings its own mask or position bias")
    kind = LayerKind(scaling, sliding_window, softcap, s_aux)
    return current_pass().attend(query, key, value, kind), None


def register() -> None:
    """Make `ATTENTION` known to transformers; harmless to repeat."""
    AttentionInterface.register(ATTENTION, row_attention)
