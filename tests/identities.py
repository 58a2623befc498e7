"""What must hold of the counts whatever happened, once nothing is held any more."""

from outrider.actors.stats import DraftStats, Stats


def check_identities(stats: Stats) -> None:
    """Every token and every proposal is counted once."""
    drafts = list(stats.drafts.values())
    for draft in drafts:
        check_draft(draft)
    emitted, cut = stats.emitted, stats.cut
    num_accepted = sum(draft.counts.num_accepted_tokens for draft in drafts)
    assert emitted["accepted"] + cut["accepted"] == num_accepted
    assert emitted["own"] + cut["own"] == sum(d.counts.num_drafts for d in drafts)
    assert cut["plain"] == 0
    assert stats.emitted_tokens == emitted["accepted"] + emitted["own"] + emitted["plain"]
    assert sum(stats.output_length.counts) == stats.finished["stop"] + stats.finished["length"]


def check_draft(draft: DraftStats) -> None:
    """Positions and methods add up to the totals; proposals are verified or dropped."""
    counts, methods = draft.counts, draft.methods.values()
    assert sum(counts.accepted_at) == counts.num_accepted_tokens
    assert sum(counts.drafted_at) == counts.num_draft_tokens >= counts.num_accepted_tokens
    assert sum(method.num_drafts for method in methods) == counts.num_drafts
    assert sum(method.num_draft_tokens for method in methods) == counts.num_draft_tokens
    assert sum(method.num_accepted_tokens for method in methods) == counts.num_accepted_tokens
    assert draft.proposals == counts.num_drafts + draft.dropped.total()
    assert draft.late <= draft.proposals
    assert draft.deaths <= draft.quarantines
    blocks = [(a, n) for b in counts.by_length.values() for a, n in enumerate(b)]
    if counts.num_drafts:
        mean_length = sum(n * (a + 1) for a, n in blocks) / counts.num_drafts
        assert abs(1 + counts.num_accepted_tokens / counts.num_drafts - mean_length) < 1e-12
