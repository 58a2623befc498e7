"""The panels about speculation: whether it pays, what is accepted, what is wasted.

A description is one sentence: how to read the panel, and what to do.
"""

from outrider.deploy.grafana import Json, Panel, Target, bargauge, stat, table, timeseries
from outrider.deploy.promql import Queries

MODEL, DRAFT = "{{model}}", "{{draft}} of {{model}}"
RATE, SHARE, SECONDS, TIMES, TOKENS = "cps", "percentunit", "s", "suffix: x", "count:tok/s"
RED_BELOW_ONE = ((0.0, "red"), (1.0, "green"))
WHOLE: Json = {"min": 0, "max": 1}


def glance(ask: Queries) -> list[Panel]:
    """Whether it pays."""
    accepted = "spec_decode_num_accepted_tokens"
    per_call = ask.per("draft_seconds", "draft_calls", "draft")
    return [
        stat(
            "Acceptance rate",
            "Share of the drafted tokens that the target accepted, stop rules aside; far below its"
            " past, look at it by draft and position in the next row.",
            Target(ask.acceptance(), MODEL),
            unit=SHARE,
            decimals=1,
        ),
        stat(
            "Mean acceptance length",
            "Tokens that a verified block brings, the target's own included: from 1, where nothing"
            " is accepted, to the draft length plus 1; near 1, drafting is in vain.",
            Target(ask.length(), MODEL),
            unit="short",
            decimals=2,
        ),
        stat(
            "Output from drafts",
            "Share of the emitted tokens that a draft wrote; low with a high acceptance rate means"
            " that many rounds run without a proposal: see the fallbacks.",
            Target(ask.output_from_drafts(), MODEL),
            unit=SHARE,
            decimals=1,
        ),
        stat(
            "Estimated speed-up",
            "How many times faster tokens come than by plain decoding, prompts aside, from the"
            " measured time of passes (plain ones of such batches in the last day, else all, which"
            " flatters); below 1 leave out the draft that does not pay.",
            Target(ask.speedup(), MODEL),
            unit=TIMES,
            decimals=2,
            steps=RED_BELOW_ONE,
        ),
        bargauge(
            "Do drafts pay?",
            "Seconds of plain decoding that a draft's accepted tokens save per second of drafting:"
            " above 1 it pays, below 1 leave it out or move it to faster hardware.",
            Target(ask.payoff(), DRAFT),
            unit=TIMES,
            steps=RED_BELOW_ONE,
            bounds={"max": 4},
        ),
        table(
            "Drafts side by side",
            "Each draft's worth and cost now: keep those that bring many tokens and pay, and see"
            " the runbook OutriderDraftSlowsDown for one that pays less than 1.",
            [
                ("accepted tok/s", TOKENS, Target(ask.rate(accepted, "draft"))),
                ("acceptance", SHARE, Target(ask.acceptance("draft"))),
                ("length", "short", Target(ask.length("draft"))),
                ("time per call", SECONDS, Target(per_call)),
                ("pays", TIMES, Target(ask.payoff())),
            ],
        ),
    ]


def acceptance(ask: Queries) -> list[Panel]:
    """By draft, position and method."""
    position = f"{DRAFT} at {{{{position}}}}"
    return [
        timeseries(
            "By draft",
            "Accepted of the drafted tokens of each draft; a fall of one draft is that draft's, a"
            " fall of all is the traffic's: measure the pair again on the new prompts.",
            Target(ask.acceptance("draft"), DRAFT),
            unit=SHARE,
            bounds=WHOLE,
        ),
        timeseries(
            "By method",
            "The same by the way in which a draft's tokens become the target's; set"
            " `drafts[].vocabulary` to the better one if `auto` chooses otherwise.",
            Target(ask.acceptance("draft", "method"), f"{DRAFT} by {{{{method}}}}"),
            unit=SHARE,
            bounds=WHOLE,
        ),
        timeseries(
            "Mean acceptance length by draft",
            "Tokens per verified block of each draft over time, the target's own included; if it"
            " stays far below the draft length plus 1, shorten `num_speculative_tokens`.",
            Target(ask.length("draft"), DRAFT),
            unit="short",
            bounds={"min": 1},
        ),
        timeseries(
            "By position, where drafted",
            "Accepted at a position of the tokens drafted there; low from the first position on"
            " means that the draft does not know this text, low only later that blocks are too"
            " long.",
            Target(ask.acceptance_where_drafted(), position),
            unit=SHARE,
            bounds=WHOLE,
        ),
        timeseries(
            "By position, of all blocks",
            "Accepted at a position per verified block, however short; these add up to the mean"
            " length less 1, so a last position near zero can be cut off.",
            Target(ask.acceptance_at(), position),
            unit=SHARE,
            bounds=WHOLE,
        ),
        bargauge(
            "By position now",
            "The present profile of acceptance where drafted: cut blocks where the bars become"
            " short.",
            Target(ask.acceptance_where_drafted(), position),
            unit=SHARE,
            bounds=WHOLE,
        ),
    ]


def waste(ask: Queries) -> list[Panel]:
    """What was drafted in vain."""
    drafted = "spec_decode_num_draft_tokens"
    reason = f"{{{{reason}}}} of {DRAFT}"
    return [
        timeseries(
            "Drafted tokens, and what became of them",
            "Verified tokens per second that were accepted and rejected; rejected ones cost"
            " drafting and room in the pass, so a thick layer of them calls for shorter blocks.",
            Target(ask.rate("spec_decode_num_accepted_tokens"), "accepted of {{model}}"),
            Target(ask.rejected(), "rejected of {{model}}"),
            unit=TOKENS,
            stacked=True,
        ),
        timeseries(
            "Rejected tokens by draft",
            "Verified and refused tokens per second of each draft; compare with what it drafts,"
            " and shorten the blocks of the worst.",
            Target(ask.rejected("draft"), f"rejected of {DRAFT}"),
            Target(ask.rate(drafted, "draft"), f"drafted by {DRAFT}"),
            unit=TOKENS,
        ),
        timeseries(
            "Proposals",
            "Proposals per second that came, came after their deadline, or were cut to what still"
            " fitted; a large late part means that the draft is slow or far away.",
            Target(ask.rate("proposals", "draft"), f"all of {DRAFT}"),
            Target(ask.rate("late_proposals", "draft"), f"late of {DRAFT}"),
            Target(ask.rate("salvaged_proposals", "draft"), f"salvaged of {DRAFT}"),
            unit=RATE,
        ),
        timeseries(
            "Dropped proposals by reason",
            "Proposals per second that were never verified; `mismatch` and `too_late` come from"
            " late drafts, `surplus` from two drafts for one round, `invalid` from a wrong pair.",
            Target(ask.rate("dropped_proposals", "draft", "reason"), reason),
            unit=RATE,
            no_value="nothing dropped",
        ),
        timeseries(
            "Fallbacks by reason",
            "Turns of sequences per second at which this draft brought nothing in time; `empty`: it"
            " had nothing to say, `deadline` and `busy`: it is too slow, `lost` and `no_draft`: it"
            " died, see Health.",
            Target(ask.rate("fallbacks", "draft", "reason"), reason),
            unit=RATE,
            no_value="no fallbacks",
        ),
        timeseries(
            "Tokens cut by stop rules",
            "Decided tokens per second that were not emitted because the answer ended before them;"
            " a large part of short answers is normal, shorter blocks reduce it.",
            Target(ask.rate("cut_tokens", "source"), "{{source}} of {{model}}"),
            unit=TOKENS,
            no_value="nothing cut",
        ),
    ]
