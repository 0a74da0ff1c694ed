"""Gauges that are read off the router's state when somebody asks for them."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .directory import Directory
from .engines import Engines
from .standing import Condition


class Census(Collector):
    """What there is right now.

    Args:
        engines: whose state is shown.
        directory: whose size is shown.
    """

    def __init__(self, engines: Engines, directory: Directory) -> None:
        self._engines = engines
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        directory = self._directory
        yield GaugeMetricFamily(
            "kvloom_conversations", "Conversations in the map.", value=len(directory)
        )
        yield GaugeMetricFamily(
            "kvloom_conversation_bytes",
            "About how much memory the map takes.",
            value=directory.num_bytes,
        )
        yield from self._of_engines()

    def _of_engines(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "kvloom_upstream_state",
            "1 for the state that an engine is in, 0 for the others.",
            labels=("engine", "role", "state"),
        )
        in_flight = GaugeMetricFamily(
            "kvloom_upstream_in_flight",
            "Legs that an engine has in flight.",
            labels=("engine", "role"),
        )
        leases = GaugeMetricFamily(
            "kvloom_leases", "Live leases of a decode engine.", labels=("engine",)
        )
        for role, engines in self._engines.by_role():
            for engine in engines:
                for condition in Condition:
                    is_it = float(engine.condition is condition)
                    state.add_metric((engine.name, role, condition), is_it)
                in_flight.add_metric((engine.name, role), engine.num_in_flight)
                if role == "decode":
                    held = self._directory.num_leases(engine.name)
                    leases.add_metric((engine.name,), held)
        yield from (state, in_flight, leases)
