"""What one draft actor knows of the sequences it serves: committed ids out, proposals in.

Only ids that the actor has not acknowledged are sent. Each life of the actor's copies is an epoch;
replies of an earlier one are dropped. Knows neither Ray nor time.
"""

from collections.abc import Iterable, Mapping

from outrider.actors.messages import Contexts, Method, Proposals
from outrider.actors.sequence import Proposal, Sequence
from outrider.actors.stats import DraftStats


class Ledger:
    """The coordinator's account of one draft actor."""

    def __init__(
        self,
        draft: str,
        configured: int,
        vocabulary_size: int,
        stats: DraftStats,
        *,
        with_law: bool,
    ) -> None:
        self._draft = draft
        self._configured = configured
        self._vocabulary_size = vocabulary_size
        self._stats = stats
        self._with_law = with_law
        self._known: dict[int, int] = {}  # sequence -> committed ids acknowledged; 0 = sent
        self.epoch = 0

    def __len__(self) -> int:
        """Sequences that the actor may hold a copy of."""
        return len(self._known)

    def expect(self, sequence: int) -> None:
        """The actor will serve this sequence."""
        self._known.setdefault(sequence, 0)

    def contexts(self, sequences: Iterable[Sequence], method: Method = "same") -> Contexts:
        """Ask for a proposal after the committed ids of each sequence."""
        contexts = Contexts(with_law=self._with_law, method=method)
        for sequence in sequences:
            self.expect(sequence.id)
            start = min(self._known[sequence.id], len(sequence.committed) - 1)
            contexts.sequence.append(sequence.id)
            contexts.epoch.append(self.epoch)
            contexts.start.append(start)
            contexts.ids.append(sequence.committed[start:])
            contexts.position.append(sequence.position)
            contexts.num_tokens.append(sequence.draft_length(self._configured))
            contexts.sampling.append(sequence.sampling)
        return contexts

    def receive(self, proposals: Proposals, alive: Mapping[int, Sequence]) -> None:
        """Hand each proposal to its sequence; what cannot be used is dropped with its reason."""
        self._stats.spend(proposals.method, proposals.seconds)
        for id in proposals.missing:
            if id in self._known:
                self._known[id] = 0
        for id, epoch, base, ids, law in zip(
            proposals.sequence,
            proposals.epoch,
            proposals.base,
            proposals.ids,
            proposals.law,
            strict=True,
        ):
            self._stats.proposals += bool(ids)
            sequence = alive.get(id)
            if epoch != self.epoch:
                self._drop("epoch", ids)
            elif sequence is None or id not in self._known:
                self._drop("ended", ids)
            elif not all(0 <= proposed < self._vocabulary_size for proposed in ids):
                self._drop("invalid", ids)
            else:
                self._known[id] = base
                if ids and sequence.proposal is None:
                    sequence.proposal = Proposal(self._draft, base, ids, law, proposals.method)
                else:
                    self._drop("surplus", ids)

    def forget(self, sequences: Iterable[int]) -> list[int]:
        """Sequences ended: which of them the actor may still hold, to be freed there."""
        return [id for id in sequences if self._known.pop(id, None) is not None]

    def begin_epoch(self) -> None:
        """The actor lost its copies: everything is sent again."""
        self.epoch += 1
        self._known.clear()

    def _drop(self, reason: str, ids: list[int]) -> None:
        if ids:
            self._stats.dropped[reason] += 1
