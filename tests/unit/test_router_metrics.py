"""What an operator's monitoring reads of warm-ups and of what was learned."""

from prometheus_client import CollectorRegistry

from kvloom.protocol import PrefillOutcome
from kvloom_server.router.metrics import Metrics


def test_learned_thresholds_are_shown_as_they_are_now() -> None:
    """A gauge for each pair of engines, with what holds at the time of asking."""
    metrics, learned = Metrics(CollectorRegistry()), {("p0", "d1"): 128}
    metrics.watch_thresholds(lambda: learned)
    series = 'kvloom_pull_threshold_tokens{decode="d1",prefill="p0"}'
    assert f"{series} 128.0" in metrics.page().decode()
    learned[("p0", "d1")] = 64
    assert f"{series} 64.0" in metrics.page().decode()


def test_warm_ups_and_their_tokens_are_counted() -> None:
    """How warm-ups end, and what they moved, is to be seen apart from turns."""
    metrics = Metrics(CollectorRegistry())
    metrics.warm_up("warm")
    outcome = PrefillOutcome(local_tokens=10, returned_tokens=500)
    metrics.warmed(outcome, num_computed=-1)
    page = metrics.page().decode()
    assert 'kvloom_warm_up_total{outcome="warm"} 1.0' in page
    assert 'kvloom_warm_up_tokens_total{source="returned"} 500.0' in page
    assert 'kvloom_warm_up_tokens_total{source="computed"} 0.0' in page
