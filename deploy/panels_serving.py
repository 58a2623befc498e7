"""The panels about serving: how fast it is, and whether all is well."""

from outrider.deploy.grafana import Panel, Target, heatmap, stat, timeseries
from outrider.deploy.panels import (
    DRAFT,
    MODEL,
    RATE,
    RED_BELOW_ONE,
    SECONDS,
    SHARE,
    TIMES,
    TOKENS,
    WHOLE,
)
from outrider.deploy.promql import Queries, ratio

NOBODY = "no coordinator"


def speed(ask: Queries) -> list[Panel]:
    """How fast tokens come, and where the time goes."""
    first_tokens = ask.rate("time_to_first_token_seconds", "le", part="_bucket")
    return [
        timeseries(
            "Output by source",
            "Tokens emitted per second: accepted from drafts, the target's own after a block, and"
            " plain; much plain means that drafts are missing.",
            Target(ask.rate("generation_tokens", "source"), "{{source}} of {{model}}"),
            unit=TOKENS,
            stacked=True,
        ),
        timeseries(
            "Prompts",
            "Tokens of prompts taken in per second; when this rises and the output falls, passes"
            " are busy with prompts: add a deployment.",
            Target(ask.rate("prompt_tokens"), MODEL),
            unit=TOKENS,
        ),
        timeseries(
            "Estimated speed-up over time",
            "How many times faster than plain decoding, as in the first row; find when it fell, and"
            " what else changed then.",
            Target(ask.speedup(), MODEL),
            unit=TIMES,
        ),
        _latency(
            ask,
            "time_to_first_token_seconds",
            "Time to first token",
            "From arrival to the first tokens; when it grows with the queue, add rows or a"
            " deployment.",
        ),
        _latency(
            ask,
            "request_time_per_output_token_seconds",
            "Time per output token",
            "Mean time between the tokens of an answer: what speculation makes shorter; when it"
            " grows, compare acceptance and the time of passes.",
        ),
        _latency(
            ask,
            "inter_token_latency_seconds",
            "Inter-token latency",
            "Between two deliveries of an answer, of which each may bring several tokens, so that"
            " good drafts do not shorten it; when it grows, rounds have become longer.",
        ),
        _latency(
            ask,
            "e2e_request_latency_seconds",
            "Whole answers",
            "From arrival to the end of an answer; read it beside the lengths of answers.",
        ),
        _latency(
            ask,
            "request_queue_time_seconds",
            "Waiting for a row",
            "From arrival until an answer got its row of the cache; more than a little calls for"
            " more rows or another deployment.",
        ),
        heatmap(
            "Time to first token, spread",
            "Answers by their time to first token; two bands mean two kinds of requests, such as"
            " short and long prompts, which one quantile would hide.",
            Target(f"sum by (le) ({first_tokens})", "{{le}}"),
            unit=SECONDS,
        ),
        timeseries(
            "A round, and where its time goes",
            "Mean time of a round by part; a long wait is the draft's, a long pass the target's,"
            " and a long overhead is the coordinator's: see whether its node is overloaded.",
            Target(ask.per("draft_wait_seconds", "rounds"), "drafts of {{model}}"),
            Target(ask.per("verify_seconds", "rounds"), "pass of {{model}}"),
            Target(ratio(f"({ask.overhead()})", ask.rate("rounds")), "overhead of {{model}}"),
            unit=SECONDS,
            stacked=True,
        ),
        timeseries(
            "Passes",
            "Mean time of the target's passes with tokens of a `prompt`, else with a drafted"
            " `block`, else `plain`; if blocks take much longer than plain ones of the same batch,"
            " they are too long.",
            Target(ask.per("verify_seconds", "rounds", "kind"), "{{kind}} of {{model}}"),
            unit=SECONDS,
        ),
        timeseries(
            "Draft calls",
            "Mean time of a batched call that proposes, as the draft measured it; when it grows,"
            " see whether the draft shares its cores or GPU.",
            Target(
                ask.per("draft_seconds", "draft_calls", "draft", "method"),
                f"{DRAFT} by {{{{method}}}}",
            ),
            unit=SECONDS,
        ),
        timeseries(
            "Sequences per round",
            "Mean batch of a pass; the more sequences share a pass, the less an accepted token"
            " saves, so shorten blocks when batches are large.",
            Target(ask.per("round_rows", "rounds"), MODEL),
            unit="short",
        ),
        timeseries(
            "Rounds",
            "Passes per second with tokens of a prompt, with a drafted block, or plain; many plain"
            " ones mean that drafts are missing.",
            Target(ask.rate("rounds", "kind"), "{{kind}} of {{model}}"),
            unit=RATE,
            stacked=True,
        ),
        timeseries(
            "Lengths of prompts and answers",
            "Median and 95th percentile in tokens; when they grow, so do time and memory: see"
            " `max_model_len` and the cache.",
            *(
                Target(ask.quantile(q, f"request_{part}_tokens"), f"{what}, {q:.0%} of {MODEL}")
                for part, what in (("prompt", "prompt"), ("generation", "answer"))
                for q in (0.5, 0.95)
            ),
            unit="short",
        ),
    ]


def _latency(ask: Queries, name: str, title: str, description: str) -> Panel:
    targets = (Target(ask.quantile(q, name), f"{q:.0%} of {MODEL}") for q in (0.5, 0.95, 0.99))
    return timeseries(title, description, *targets, unit=SECONDS)


def health(ask: Queries) -> list[Panel]:
    """What is held, and what was lost."""
    return [
        stat(
            "Target",
            "Whether the target is loaded and answers; while it is lost, answers wait for it: see"
            " the runbook OutriderTargetLost.",
            Target(f"min by (model) ({ask.series('target_ready')})", MODEL),
            unit="short",
            no_value=NOBODY,
            steps=RED_BELOW_ONE,
            words={0: "lost", 1: "ready"},
        ),
        stat(
            "Running",
            "Answers in the making, each in a row of the cache; as many as there are rows means"
            " that others wait.",
            Target(ask.level("num_requests_running"), MODEL),
            unit="short",
            no_value=NOBODY,
        ),
        stat(
            "Waiting",
            "Answers that wait for a row; near `target.max_queued`, requests are refused: see the"
            " runbook OutriderQueueFull.",
            Target(ask.level("num_requests_waiting"), MODEL),
            unit="short",
            no_value=NOBODY,
        ),
        stat(
            "Drafts living",
            "Share of the configured replicas that answer; below 100 % look for nodes that left,"
            " replacements come by themselves.",
            Target(ratio(ask.level("draft_replicas_living"), ask.level("draft_replicas")), MODEL),
            unit=SHARE,
            no_value="no drafts",
            steps=RED_BELOW_ONE,
        ),
        timeseries(
            "Requests",
            "Answers running and waiting, and how many may wait; a queue that stays calls for more"
            " rows or another deployment.",
            Target(ask.level("num_requests_running"), "running of {{model}}"),
            Target(ask.level("num_requests_waiting"), "waiting for {{model}}"),
            Target(ask.level("max_requests_waiting"), "may wait for {{model}}"),
            unit="short",
            no_value=NOBODY,
        ),
        timeseries(
            "Cache in use",
            "Share of the rows, and of the tokens that they could hold; all rows and few tokens:"
            " `max_num_seqs` can grow if `max_model_len` shrinks.",
            Target(
                ratio(ask.level("cache_rows_used"), ask.level("cache_rows")), "rows of {{model}}"
            ),
            Target(
                ratio(ask.level("cache_tokens_used"), ask.level("cache_tokens")),
                "tokens of {{model}}",
            ),
            unit=SHARE,
            no_value=NOBODY,
            bounds=WHOLE,
        ),
        timeseries(
            "Draft replicas",
            "Replicas configured, and those of them that answer; a gap that stays means that no"
            " node has the draft's labels: see the runbook OutriderDraftsGone.",
            Target(ask.level("draft_replicas_living", "draft"), f"living of {DRAFT}"),
            Target(ask.level("draft_replicas", "draft"), f"configured of {DRAFT}"),
            unit="short",
            no_value="no drafts",
        ),
        timeseries(
            "Draft replicas lost",
            "Replicas so far that stopped answering (quarantines), and those of them that were"
            " replaced (deaths); each step is an event: see the node's log of that time.",
            Target(ask.so_far("draft_quarantines", "draft"), f"quarantines of {DRAFT}"),
            Target(ask.so_far("draft_deaths", "draft"), f"deaths of {DRAFT}"),
            unit="short",
            no_value="none lost",
        ),
        timeseries(
            "Answers by finish reason",
            "Answers that ended per second; many `abort` are clients that gave up, `error` has its"
            " reason in the coordinator's log.",
            Target(ask.rate("requests", "reason"), "{{reason}} of {{model}}"),
            unit=RATE,
        ),
        timeseries(
            "Errors, refusals and rebuilds",
            "Answers so far that failed, and that were refused with 429, and times that the target"
            " was lost; each step is an event: see the log, and the queue for refusals.",
            Target(ask.so_far("requests", where=('reason="error"',)), "failed of {{model}}"),
            Target(ask.so_far("rejected_requests"), "refused of {{model}}"),
            Target(ask.so_far("target_rebuilds"), "target of {{model}} lost"),
            unit="short",
            no_value="none",
        ),
    ]
