"""The choice of method: the one that pays more, the other tried again now and then."""

from collections import Counter

from outrider.actors.messages import Method
from outrider.actors.method_choice import MethodChoice
from outrider.actors.stats import DraftStats

BOTH: tuple[Method, ...] = ("string", "token")


def serve(
    choice: MethodChoice, stats: DraftStats, calls: int, accepted: dict[Method, int]
) -> Counter[Method]:
    """Calls of one second each that bring so many accepted tokens."""
    used: Counter[Method] = Counter()
    for _ in range(calls):
        method = choice.choose(stats.methods)
        used[method] += 1
        stats.spend(method, 1.0)
        stats.record(method, 4, accepted[method])
    return used


def test_one_method_is_no_choice() -> None:
    assert serve(MethodChoice(("same",)), DraftStats(), 50, {"same": 0}) == {"same": 50}


def test_both_are_tried_then_the_better_is_used_and_the_other_not_forgotten() -> None:
    for better, worse in (BOTH, BOTH[::-1]):
        used = serve(MethodChoice(BOTH), DraftStats(), 800, {better: 3, worse: 1})
        assert used[worse] == 4 + 49  # calls 16, 32, ... 784
        assert used[better] == 800 - used[worse]


def test_seconds_count_as_much_as_tokens() -> None:
    choice, stats = MethodChoice(BOTH), DraftStats()
    used: Counter[Method] = Counter()
    for _ in range(200):
        method = choice.choose(stats.methods)
        used[method] += 1
        stats.spend(method, 3.0 if method == "string" else 1.0)
        stats.record(method, 4, 2 if method == "string" else 1)
    assert used["token"] > 170


def test_when_the_text_changes_its_mind_so_does_the_choice() -> None:
    choice, stats = MethodChoice(BOTH), DraftStats()
    serve(choice, stats, 300, {"string": 3, "token": 1})
    used = serve(choice, stats, 600, {"string": 0, "token": 1})
    assert used["token"] > 400


def test_a_choice_without_any_news_is_still_a_choice() -> None:
    choice = MethodChoice(BOTH)
    assert {choice.choose({}) for _ in range(100)} == set(BOTH)
