"""What dashboards and rules ask of Prometheus, as functions of the names and a window.

A rate is taken of each series first, then added up, then divided: counters of a coordinator that
came back begin at zero again. Where nothing happened a ratio has no value, rather than NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.deploy.instruments import BY_NAME

RAY_PREFIX = "ray_"  # which Ray's agents put before every name; prometheus-client's have none
LONG = "1d"  # for what is rare, and for what was usual
_PLAIN, _DECODING = 'kind="plain"', 'kind!="prompt"'


@dataclass(frozen=True)
class Queries:
    """Rates over one window, of the series that match, by model and other labels."""

    prefix: str
    window: str
    matchers: Mapping[str, str] = field(default_factory=dict)  # label -> operator and value

    def over(self, window: str) -> "Queries":
        """The same of another window."""
        return replace(self, window=window)

    def series(self, name: str, *matchers: str, part: str = "") -> str:
        """The series of an instrument; `part` of a histogram."""
        instrument = BY_NAME[f"outrider_{name}"]
        own = (f"{x}{self.matchers[x]}" for x in instrument.labels if x in self.matchers)
        every = ", ".join((*own, *matchers))
        return f"{self.prefix}{instrument.series}{part}" + (f"{{{every}}}" if every else "")

    def level(self, name: str, *by: str) -> str:
        """What a gauge comes to."""
        return f"sum {_by(*by)} ({self.series(name)})"

    def so_far(self, name: str, *by: str, where: tuple[str, ...] = ()) -> str:
        """What a counter has come to; rounded, since Ray's begin a little above zero."""
        return f"round(sum {_by(*by)} ({self.series(name, *where)}))"

    def rate(self, name: str, *by: str, where: tuple[str, ...] = (), part: str = "") -> str:
        """Growth per second."""
        series = self.series(name, *where, part=part)
        return f"sum {_by(*by)} (rate({series}[{self.window}]))"

    def quantile(self, q: float, name: str) -> str:
        """A quantile of a histogram's observations."""
        buckets = self.rate(name, "le", part="_bucket")
        return f"histogram_quantile({q}, {buckets}) and {self.rate(name, part='_count')} > 0"

    # Speculation.

    def acceptance(self, *by: str) -> str:
        """Accepted of the drafted tokens."""
        return ratio(
            self.rate("spec_decode_num_accepted_tokens", *by),
            self.rate("spec_decode_num_draft_tokens", *by),
        )

    def length(self, *by: str) -> str:
        """Tokens that a verified block brings, the target's own included."""
        accepted = self.rate("spec_decode_num_accepted_tokens", *by)
        return f"1 + {ratio(accepted, self.rate('spec_decode_num_drafts', *by))}"

    def acceptance_where_drafted(self) -> str:
        """By position: accepted of what was drafted there."""
        return ratio(*self._at_positions())

    def acceptance_at(self) -> str:
        """By position: accepted of all blocks, however short."""
        accepted, _ = self._at_positions()
        blocks = self.rate("spec_decode_num_drafts", "draft")
        return f"{accepted} / on (model, draft) group_left () ({blocks} > 0)"

    def _at_positions(self) -> tuple[str, str]:
        by = ("draft", "position")
        return (
            self.rate("spec_decode_num_accepted_tokens_per_pos", *by),
            self.rate("spec_decode_num_draft_tokens_per_pos", *by),
        )

    def rejected(self, *by: str) -> str:
        """Drafted tokens per second that were not accepted."""
        drafted = self.rate("spec_decode_num_draft_tokens", *by)
        accepted = self.rate("spec_decode_num_accepted_tokens", *by)
        return f"{drafted} - {accepted}"

    def output_from_drafts(self) -> str:
        """Share of the output."""
        accepted = self.rate("generation_tokens", where=('source="accepted"',))
        return ratio(accepted, self.rate("generation_tokens"))

    # Time.

    def per(self, what: str, count: str, *by: str, where: tuple[str, ...] = ()) -> str:
        """Mean of a counter for one of what another counts."""
        return ratio(self.rate(what, *by, where=where), self.rate(count, *by, where=where))

    def overhead(self, *where: str) -> str:
        """Seconds per second in rounds, but neither in drafts nor in passes."""
        parts = ("round_seconds", "draft_wait_seconds", "verify_seconds")
        return " - ".join(self.rate(part, where=where) for part in parts)

    def plain_pass(self) -> str:
        """Seconds of a plain pass of about the present batch, else of any pass without a prompt.

        Plain ones are rare, and mostly of the few sequences that are about to end.
        """
        usual = self.over(LONG)
        measured = usual.per("verify_seconds", "rounds", where=(_PLAIN,))
        batch = usual.per("round_rows", "rounds", where=(_PLAIN,))
        now = self.per("round_rows", "rounds", where=(_DECODING,))
        is_alike = f"{batch} > 0.5 * {now} and {batch} < 2 * {now}"
        otherwise = self.per("verify_seconds", "rounds", where=(_DECODING,))
        return f"({measured} and ({is_alike}) or {otherwise})"

    def _plain_time(self) -> str:
        """Seconds per second that as many rounds would have taken without drafts."""
        rounds = self.rate("rounds", where=(_DECODING,))
        return f"({self.plain_pass()} * {rounds} + {self.overhead(_DECODING)})"

    def speedup(self) -> str:
        """Tokens per row of a pass, times a plain round's time over a round's.

        Of rounds without a prompt: plain decoding would spend the same on prompts.
        """
        own = ('source!="accepted"',)  # one token of each row, emitted or cut
        rows = " + ".join(
            self.rate(name, where=own) for name in ("generation_tokens", "cut_tokens")
        )
        tokens = ratio(self.rate("generation_tokens"), f"({rows})")
        seconds = self.rate("round_seconds", where=(_DECODING,))
        return f"{tokens} * {ratio(self._plain_time(), seconds)}"

    def payoff(self) -> str:
        """Seconds of plain decoding that a draft's accepted tokens save, per second of drafting.

        Replicas that draft at the same time are one second, not several.
        """
        accepted = self.rate("spec_decode_num_accepted_tokens", "draft")
        seconds = self.rate("draft_seconds", "draft")
        rows = self.rate("round_rows", where=(_DECODING,))
        saved = ratio(self._plain_time(), rows)  # by one token
        at_once = _per_model(self.rate("draft_calls", "draft"), f"({self.rate('rounds')} > 0)")
        gain = _per_model(accepted, f"({saved})", "*")
        return f"{gain} * clamp_min({at_once}, 1) / ({seconds} > 0)"


def ratio(part: str, whole: str) -> str:
    """No value without a whole."""
    return f"{part} / ({whole} > 0)"


def _per_model(by_draft: str, by_model: str, operator: str = "/") -> str:
    return f"{by_draft} {operator} on (model) group_left () {by_model}"


def _by(*labels: str) -> str:
    return f"by ({', '.join(('model', *labels))})"
