"""A draft and a target of different vocabularies: which ids mean the same, and one text in both.

`Pair` maps ids one to one where both sides have a token of the same bytes, or a special token of
the same content or role. `View` keeps a sequence's committed ids, which are the target's and are
never retokenised, as draft ids that spell the same bytes. Timor et al., "Accelerating LLM inference
with lossless speculative decoding algorithms for heterogeneous vocabularies" (ICML 2025). Knows no
models, no rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from outrider.actors.messages import LoadReport, Method
from outrider.actors.spelling import Spelling
from outrider.actors.vocabulary import explain_difference
from outrider.cluster.errors import ConfigError

Wanted = Literal["auto", "string", "token"]

_MOST_FAILURES = 0.2  # of the probe's words; a tokenizer that fails more does not keep text
_LOOK_BACK = 24  # draft ids whose border may move when text is appended
_BLANKS = (b" ", b"\t", b"\r", b"\n")


@dataclass(frozen=True)
class PairReport:
    """What examining a pair found."""

    methods: tuple[Method, ...]
    num_shared: int = 0  # ids mapped one to one
    num_draft: int = 0  # ids of the draft that stand for a token
    num_target: int = 0
    draft_failures: float = 0.0  # share of the probe's words that do not come back
    target_failures: float = 0.0

    def __str__(self) -> str:
        if self.methods == ("same",):
            return "the target's own vocabulary"
        return (
            f"another vocabulary, {self.num_shared:,} of its {self.num_draft:,} tokens are among "
            f"the target's {self.num_target:,}; round-trip failures on the probe: draft "
            f"{self.draft_failures:.1%}, target {self.target_failures:.1%}; "
            f"served by {' or '.join(self.methods)}"
        )


def pair_up(target: LoadReport, draft: LoadReport, wanted: Wanted) -> "tuple[Pair, PairReport]":
    """The pair of a loaded target and draft, examined; ConfigError says why it cannot be served."""
    spellings = []
    for side, report in (("target", target), ("draft", draft)):
        if report.tokenizer is None:
            raise ConfigError(
                f"the {side}'s tokenizer is not one of the `tokenizers` library, so that a draft "
                "of another vocabulary cannot be translated: choose a draft of the same family"
            )
        spellings.append(Spelling(report.tokenizer, report.vocabulary, report.num_ids))
    pair = Pair(*spellings)
    return pair, pair.examine(wanted)


def has_same_vocabulary(target: LoadReport, draft: LoadReport) -> bool:
    """Whether every id that the target may emit is the same token to the draft and its model."""
    difference = explain_difference(target.vocabulary, draft.vocabulary)
    return difference is None and draft.num_ids >= target.num_ids


class Pair:
    """The vocabularies of one target and one draft."""

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target = target
        self.draft = draft
        self.to_target: dict[int, int] = {}  # draft id -> target id, one to one
        for piece, id in draft.ids.items():
            if piece in target.ids:
                self.to_target[id] = target.ids[piece]
        self._map_special()
        self.to_draft = {theirs: own for own, theirs in self.to_target.items()}

    def examine(self, wanted: Wanted) -> PairReport:
        """What can serve the pair of what is `wanted`; ConfigError says why nothing can."""
        target, draft = self.target, self.draft
        failures = target.count_failures(), draft.count_failures()
        keeps_text = [share <= _MOST_FAILURES for share in failures]
        self.has_text = all(keeps_text)
        methods: list[Method] = []
        if self.has_text and wanted != "token":
            methods.append("string")
        if self.to_target and wanted != "string":
            methods.append("token")
        sides = zip(("target", "draft"), keeps_text, failures, strict=True)
        lossy = ", ".join(
            f"the {side}'s tokenizer loses text ({share:.0%} of a probe's words do not come back: "
            "it normalises, or lacks bytes)"
            for side, keeps, share in sides
            if not keeps
        )
        if any(keeps_text) and not all(keeps_text):
            raise ConfigError(f"{lossy}: no method can serve such a pair")
        if not methods:
            reason = lossy if wanted == "string" else "no token of it is among the target's"
            raise ConfigError(f"vocabulary: {wanted} cannot serve the pair: {reason}")
        return PairReport(
            tuple(methods),
            len(self.to_target),
            len(draft.pieces) + len(draft.special),
            len(target.pieces) + len(target.special),
            failures[1],
            failures[0],
        )

    def _map_special(self) -> None:
        """By content, else by role; an id that is mapped already keeps its partner."""
        target, draft = self.target, self.draft
        by_content = {content: id for id, content in target.special.items()}
        pairs = [(id, by_content.get(content)) for id, content in draft.special.items()]
        pairs += [(id, target.roles.get(role)) for role, id in draft.roles.items()]
        taken = set(self.to_target.values())
        for own, theirs in pairs:
            if theirs is None or own in self.to_target or theirs in taken:
                continue
            self.to_target[own] = theirs
            taken.add(theirs)


@dataclass
class View:
    """One sequence's committed ids as the draft reads them: `ids` spell the same bytes.

    A pair whose tokenizers both lose text is read id by id, unknown where there is no partner.
    """

    pair: Pair

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        lead = self.pair.draft.lead
        self.ids = [] if lead is None else [lead]
        self._committed: list[int] = []
        self._sealed = len(self.ids)  # ids before this border never change

    def follow(self, committed: Sequence[int]) -> None:
        """Take in what was committed since; only the end of `ids` changes."""
        known = len(self._committed)
        if committed[:known] != self._committed:
            self._begin()
            known = 0
        for is_special, run in groupby(committed[known:], self.pair.target.special.__contains__):
            if not self.pair.has_text:
                self._append_ids(run)
            elif is_special:
                self._append_special(run)
            else:
                self._append_text(self.pair.target.spell(run))
        self._committed = list(committed)

    def _append_special(self, run: Iterable[int]) -> None:
        for id in run:
            partner = self.pair.to_draft.get(id)
            if partner is None:
                self._append_text(self.pair.target.spell([id]))
            elif self.ids != [partner]:  # the draft's own beginning of a text is there already
                self.ids.append(partner)
                self._sealed = len(self.ids)

    def _append_ids(self, run: Iterable[int]) -> None:
        for id in run:
            partner = self.pair.to_draft.get(id, self.pair.draft.unknown_id)
            if partner is not None:
                self.ids.append(partner)

    def _append_text(self, data: bytes) -> None:
        """Encode again from a border that the new bytes cannot move."""
        draft = self.pair.draft
        border = self._border()
        self.ids[border:] = draft.encode(draft.spell(self.ids[border:]) + data)

    def _border(self) -> int:
        """Where the last word begins, at most `_LOOK_BACK` ids from the end."""
        draft, ids = self.pair.draft, self.ids
        first = max(self._sealed, len(ids) - _LOOK_BACK)
        for index in range(len(ids) - 1, first, -1):
            before, piece = draft.spell([ids[index - 1]]), draft.spell([ids[index]])
            if piece.startswith(_BLANKS) and not before.endswith(_BLANKS):
                return index
        while first > self._sealed and _continues_character(draft.spell([ids[first]])):
            first -= 1
        return first


def _continues_character(piece: bytes) -> bool:
    return piece != b"" and piece[0] & 0xC0 == 0x80
