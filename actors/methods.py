"""How a draft's tokens become the target's: same vocabulary, token by token, or through text.

Every method draws among ids that begin with the target's own, so that noise, laws and the request's
options are keyed by the *target* id and draft and target race alike. `Same` draws as the target
does. `Token` masks the draft to what both vocabularies have (TLI; Timor et al. 2025, with the law
renormalised, so that it is what was really sampled). `String` draws among all of the draft's tokens
and tokenises the text they spell for the target (SLEM, ibid.). Knows no models and no rounds.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.actors.pairing import Pair
from outrider.actors.spelling import complete_length


@dataclass
class Draft:
    """What is drafted for one sequence so far; at most `num_tokens` ids are wanted."""

    num_tokens: int
    ids: list[int] = field(default_factory=list)  # the target's
    own: list[int] = field(default_factory=list)  # the draft's: what its model runs
    num_certain: int = 0  # `ids` that further text would not change
    has_ended: bool = False  # nothing can be drafted past here

    @property
    def is_done(self) -> bool:
        """Whether drafting on would add nothing."""
        return self.has_ended or self.num_certain >= self.num_tokens

    @property
    def proposed(self) -> list[int]:
        """The ids to propose."""
        return self.ids[: min(self.num_certain, self.num_tokens)]


class DraftMethod(Protocol):
    """One way from a draft's logits to ids of the target."""

    def spread(self, logits: Tensor) -> Tensor:
        """The draft's logits [P, V of the draft] over the ids to draw from."""

    def add(self, draft: Draft, drawn: int) -> None:
        """Take in the id that was drawn."""


class Same:
    """The draft has the target's vocabulary."""

    def spread(self, logits: Tensor) -> Tensor:
        """The logits themselves."""
        return logits

    def add(self, draft: Draft, drawn: int) -> None:
        """The id is its own translation."""
        draft.ids.append(drawn)
        draft.own.append(drawn)
        draft.num_certain += 1


class Token:
    """Only ids that both vocabularies have are drafted, each as its partner."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._own = torch.tensor(list(pair.to_target))
        self._partners = torch.tensor(list(pair.to_target.values()))

    def spread(self, logits: Tensor) -> Tensor:
        """[P, V of the target]: each shared id's logit, -inf elsewhere."""
        spread = logits.new_full((len(logits), self._pair.target.num_ids), float("-inf"))
        own, partners = self._own.to(logits.device), self._partners.to(logits.device)
        return spread.index_copy_(1, partners, logits.index_select(1, own))

    def add(self, draft: Draft, drawn: int) -> None:
        """The id, and its partner for the draft's own text."""
        draft.ids.append(drawn)
        draft.own.append(self._pair.to_draft[drawn])
        draft.num_certain += 1


class String:
    """All of the draft's tokens are drafted; what they spell is tokenised for the target.

    A token without partner races with noise of its own, under an id beyond the target's.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        num_ids = pair.target.num_ids
        drawable = [*pair.draft.pieces, *pair.draft.special]
        self._own = torch.tensor(drawable)
        self._places = torch.tensor([pair.to_target.get(id, num_ids + id) for id in drawable])

    def spread(self, logits: Tensor) -> Tensor:
        """[P, V of the target + V of the draft]: the draft's ids, each once; -inf elsewhere."""
        width = self._pair.target.num_ids + self._pair.draft.num_ids
        spread = logits.new_full((len(logits), width), float("-inf"))
        own, places = self._own.to(logits.device), self._places.to(logits.device)
        return spread.index_copy_(1, places, logits.index_select(1, own))

    def add(self, draft: Draft, drawn: int) -> None:
        """The target's ids of the text so far; the last may be uncertain."""
        pair = self._pair
        num_ids = pair.target.num_ids
        own = pair.to_draft[drawn] if drawn < num_ids else drawn - num_ids
        if own in pair.draft.special:
            # Nothing is drafted past a special token; the text before it is complete.
            draft.ids = pair.target.encode(pair.draft.spell(draft.own))
            draft.ids += [drawn] if drawn < num_ids else []
            draft.num_certain = len(draft.ids)
            draft.has_ended = True
        else:
            text = pair.draft.spell([*draft.own, own])
            # What more text could merge into is held back: a last piece, half a character.
            draft.ids = pair.target.encode(text[: complete_length(text)])
            merges = bool(draft.ids) and draft.ids[-1] in pair.target.prefixes
            draft.num_certain = len(draft.ids) - merges
        draft.own.append(own)
