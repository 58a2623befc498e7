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
from outrider.actors.spelling import Piece, Spelling
from outrider.cluster.errors import ConfigError

Wanted = Literal["auto", "string", "token"]

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
    same = target.vocabulary.digest == draft.vocabulary.digest
    return same and draft.num_ids >= target.num_ids


class Pair:
    """The vocabularies of one target and one draft."""

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target = target
        self.draft = draft
        self.has_text = target.keeps_text and draft.keeps_text  # else ids are read one by one
        self.to_target: dict[int, int] = {}  # draft id -> target id, one to one
        for piece, id in draft.ids.items():
            if piece in target.ids:
                self.to_target[id] = target.ids[piece]
        self._map_special()
        self.to_draft = {theirs: own for own, theirs in self.to_target.items()}

    def examine(self, wanted: Wanted) -> PairReport:
        """What can serve the pair of what is `wanted`; ConfigError says why nothing can."""
        target, draft = self.target, self.draft
        keeps_text = target.keeps_text, draft.keeps_text
        methods: list[Method] = []
        if self.has_text and wanted != "token":
            methods.append("string")
        if self.to_target and wanted != "string":
            methods.append("token")
        lossy = ", ".join(
            f"the {side}'s tokenizer loses text (what its own tokens spell does not come back)"
            for side, keeps in zip(("target", "draft"), keeps_text, strict=True)
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
            draft.count_failures(),
            target.count_failures(),
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


class View:
    """One sequence's committed ids as the draft reads them: `ids` spell the same bytes.

    What the draft cannot spell is its unknown token, or left out, until more bytes make it
    something that it can. A pair whose tokenizers both lose text is read id by id.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._begin()

    def _begin(self) -> None:
        lead = self._pair.draft.lead
        self.ids: list[int] = [] if lead is None else [lead]
        self._committed: list[int] = []
        self._pieces: list[Piece] = []  # of the text since the last special token, with its bytes

    def follow(self, committed: Sequence[int]) -> None:
        """Take in what was committed since; only the end of `ids` changes."""
        known = len(self._committed)
        if committed[:known] != self._committed:
            self._begin()
            known = 0
        target = self._pair.target
        for is_special, run in groupby(committed[known:], target.special.__contains__):
            if not self._pair.has_text:
                self._append_ids(run)
            elif is_special:
                self._append_special(run, is_first=known == 0 and committed[0] in target.special)
            else:
                self._append_text(target.spell(run))
        self._committed = list(committed)

    def _append_ids(self, run: Iterable[int]) -> None:
        for id in run:
            partner = self._pair.to_draft.get(id, self._pair.draft.unknown_id)
            if partner is not None:
                self.ids.append(partner)

    def _append_special(self, run: Iterable[int], *, is_first: bool) -> None:
        for id in run:
            partner = self._pair.to_draft.get(id)
            if partner is None:
                self._append_text(self._pair.target.spell([id]))
            elif not (is_first and self.ids == [self._pair.draft.lead] == [partner]):
                self.ids.append(partner)
                self._pieces = []
            is_first = False

    def _append_text(self, data: bytes) -> None:
        """Encode again from a border that the new bytes cannot move."""
        border = self._border()
        changed = self._pieces[border:]
        new = self._pair.draft.split(b"".join(piece for _, piece in changed) + data)
        self._pieces[border:] = new
        num_kept = len(self.ids) - sum(id is not None for id, _ in changed)
        self.ids[num_kept:] = [id for id, _ in new if id is not None]

    def _border(self) -> int:
        """Where the last word begins, at most `_LOOK_BACK` pieces from the end."""
        pieces = [piece for _, piece in self._pieces[-_LOOK_BACK - 1 :]]
        first = len(self._pieces) - len(pieces)
        for index in range(len(pieces) - 1, 0, -1):
            if pieces[index].startswith(_BLANKS) and not pieces[index - 1].endswith(_BLANKS):
                return first + index
        while first > 0 and _continues_character(self._pieces[first][1]):
            first -= 1
        return first


def _continues_character(piece: bytes) -> bool:
    return piece != b"" and piece[0] & 0xC0 == 0x80
