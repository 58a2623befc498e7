"""What dashboards and rules ask of Prometheus, as functions of the names and a window.

A rate is taken of each series first, then added up, then divided: counters of a coordinator that
came back begin at zero again. Where nothing happened a ratio has no value, rather than NaN. Under
Ray a counter exists only from its first event on, so a missing part of a whole is a zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.deploy.instruments import BY_NAME

RAY_PREFIX = "ray_"  # which Ray's agents put before every name; prometheus-client's have none
LONG = "1d"  # for what is rare, and for what was usual


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

    def level(self, name: str, *by: str, where: tuple[str, ...] = ()) -> str:
        """What a gauge, or a counter so far, comes to."""
        return f"sum {_by(*by)} ({self.series(name, *where)})"

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
        return share(
            self.rate("spec_decode_num_accepted_tokens", *by),
            self.rate("spec_decode_num_draft_tokens", *by),
        )

    def length(self, *by: str) -> str:
        """Tokens that a verified block brings, the target's own included."""
        accepted = self.rate("spec_decode_num_accepted_tokens", *by)
        return f"1 + {share(accepted, self.rate('spec_decode_num_drafts', *by))}"

    def acceptance_where_drafted(self) -> str:
        """By position: accepted of what was drafted there."""
        return share(*self._at_positions())

    def acceptance_at(self) -> str:
        """By position: accepted of all blocks, however short."""
        accepted, drafted = self._at_positions()
        blocks = self.rate("spec_decode_num_drafts", "draft")
        filled = f"({accepted} or 0 * {drafted})"
        return f"{filled} / on (model, draft) group_left () ({blocks} > 0)"

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
        return f"{drafted} - ({accepted} or 0 * {drafted})"

    def output_from_drafts(self) -> str:
        """Share of the output."""
        accepted = self.rate("generation_tokens", where=('source="accepted"',))
        return share(accepted, self.rate("generation_tokens"))

    # Time.

    def per(self, seconds: str, count: str, *by: str) -> str:
        """Mean seconds for one of what another counter counts."""
        return ratio(self.rate(seconds, *by), self.rate(count, *by))

    def overhead(self) -> str:
        """Seconds per second in rounds, but neither in drafts nor in passes."""
        parts = ("round_seconds", "draft_wait_seconds", "verify_seconds")
        return " - ".join(self.rate(part) for part in parts)

    def plain_pass(self) -> str:
        """Seconds of a pass without drafts, else of any pass: plain ones are rare."""
        measured = self.over(LONG).per("plain_verify_seconds", "plain_rounds")
        return f"({measured} or {self.per('verify_seconds', 'rounds')})"

    def _plain_time(self) -> str:
        """Seconds per second that as many rounds would have taken without drafts."""
        return f"({self.plain_pass()} * {self.rate('rounds')} + {self.overhead()})"

    def speedup(self) -> str:
        """Tokens per row of a pass, times a plain round's time over a round's."""
        rows = self.rate("generation_tokens", where=('source!="accepted"',))  # one of each row
        tokens = ratio(self.rate("generation_tokens"), rows)
        return f"{tokens} * {ratio(self._plain_time(), self.rate('round_seconds'))}"

    def payoff(self) -> str:
        """Seconds of plain decoding that a draft's accepted tokens save, per second of drafting.

        Replicas that draft at the same time are one second, not several.
        """
        accepted = self.rate("spec_decode_num_accepted_tokens", "draft")
        seconds = self.rate("draft_seconds", "draft")
        saved = ratio(self._plain_time(), self.rate("round_rows"))  # by one token
        at_once = _per_model(self.rate("draft_calls", "draft"), f"({self.rate('rounds')} > 0)")
        gain = _per_model(f"({accepted} or 0 * {seconds})", f"({saved})", "*")
        return f"{gain} * clamp_min({at_once}, 1) / ({seconds} > 0)"


def ratio(part: str, whole: str) -> str:
    """No value without a whole."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """A ratio whose part may be missing: zero then."""
    return ratio(f"({part} or 0 * {whole})", whole)


def _per_model(by_draft: str, by_model: str, operator: str = "/") -> str:
    return f"{by_draft} {operator} on (model) group_left () {by_model}"


def _by(*labels: str) -> str:
    return f"by ({', '.join(('model', *labels))})"
