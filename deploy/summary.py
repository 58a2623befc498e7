"""Summary: what the answers of a bench say, as numbers; speculation off and on side by side.

Pure. Counts are pooled over all requests before any ratio is taken; ratios are never averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.actors.requests import SpeculationCounts
from outrider.deploy.load import Run


@dataclass(frozen=True)
class Spread:
    """Mean, median and 99th percentile of times in milliseconds; None where there were none."""

    mean: float | None
    median: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Summarise times given in seconds."""
        if not seconds:
            return cls(None, None, None)
        times = np.asarray(seconds) * 1000
        return cls(float(times.mean()), float(np.median(times)), float(np.percentile(times, 99)))


@dataclass(frozen=True)
class Summary:
    """All turns of one side at one concurrency, pooled. Rates are None when nothing was drafted."""

    requests: int
    failed: int
    seconds: float  # summed over the turns
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None  # accepted / drafted tokens
    acceptance_length: float | None  # 1 + accepted tokens / drafts: the bonus token included
    acceptance_by_position: list[float]  # drafts whose token at that position was accepted / drafts


@dataclass(frozen=True)
class Comparison:
    """Speculation off against on, at one concurrency."""

    concurrency: int
    off: Summary
    on: Summary
    speedup: float | None  # on / off, output tokens per second
    compared_outputs: int  # prompts answered on both sides
    differing_outputs: int  # of these, prompts with an output that differs between the sides


def summarise(runs: Sequence[Run]) -> Summary:
    """Pool the turns of one side."""
    answers = [answer for run in runs for answer in run.answers]
    good = [answer for answer in answers if answer.error is None]
    seconds = sum(run.seconds for run in runs)
    output_tokens = sum(answer.output_tokens for answer in good)
    counts = SpeculationCounts()
    for answer in good:
        counts.add(answer.counts)
    drafts, drafted = counts.num_drafts, counts.num_draft_tokens
    return Summary(
        requests=len(answers),
        failed=len(answers) - len(good),
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        ttft_ms=Spread.of([a.ttft_s for a in good if a.ttft_s is not None]),
        tpot_ms=Spread.of([a.tpot_s for a in good if a.tpot_s is not None]),
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=counts.num_accepted_tokens,
        acceptance_rate=counts.num_accepted_tokens / drafted if drafted else None,
        acceptance_length=1 + counts.num_accepted_tokens / drafts if drafts else None,
        acceptance_by_position=[at / drafts for at in counts.accepted_at] if drafts else [],
    )


def compare(concurrency: int, off: Sequence[Run], on: Sequence[Run]) -> Comparison:
    """Set the turns of one concurrency side by side; turn i of `off` is compared with i of `on`."""
    compared, differing = set(), set()
    for plain, speculative in zip(off, on, strict=True):
        for index, (a, b) in enumerate(zip(plain.answers, speculative.answers, strict=True)):
            if a.error is None and b.error is None:
                compared.add(index)
                if (a.token_ids, a.text) != (b.token_ids, b.text):
                    differing.add(index)
    before, after = summarise(off), summarise(on)
    speedup = None
    if before.output_tokens:
        speedup = after.output_tokens_per_s / before.output_tokens_per_s
    return Comparison(concurrency, before, after, speedup, len(compared), len(differing))
