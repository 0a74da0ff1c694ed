"""What a client knows of one turn: the router's plan, and the wait for it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from .protocol import PlanKind, PlanReport, Reason

REPORT_KEY: Final = "kvloom"
"""Under which an answer, or the chunk that ends it, holds the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """One turn as its client saw it."""

    plan: PlanReport | None
    """``None`` when the server is not a kvloom router."""
    ttft_s: float | None
    """Seconds from sending to the first chunk of output; ``None`` when the
    answer was not streamed."""

    def __str__(self) -> str:
        """For people: the plan's line, and the time to first token."""
        told = "no plan of a kvloom router" if self.plan is None else str(self.plan)
        if self.ttft_s is None:
            return told
        return f"{told}; first token after {self.ttft_s:.2f} s"

    def as_json(self) -> dict[str, Any]:
        """One flat object: the plan's fields and ``ttft_s``."""
        plan = {} if self.plan is None else asdict(self.plan)
        # Plain strings: checkpointers know no enum of ours.
        plain = {k: str(v) if isinstance(v, str) else v for k, v in plan.items()}
        return {**plain, "ttft_s": self.ttft_s}

    @classmethod
    def of_json(cls, value: object) -> "TurnReport | None":
        """The report in decoded JSON, or ``None`` when it is not one."""
        if not isinstance(value, Mapping) or "ttft_s" not in value:
            return None
        fields = {k: v for k, v in value.items() if k != "ttft_s"}
        try:
            plan = _plan_of(fields) if fields else None
        except (KeyError, TypeError, ValueError):
            return None
        return cls(plan=plan, ttft_s=value["ttft_s"])


def _plan_of(fields: Mapping[str, Any]) -> PlanReport:
    rest = {k: v for k, v in fields.items() if k not in ("plan", "reason")}
    return PlanReport(
        plan=PlanKind(fields["plan"]), reason=Reason(fields["reason"]), **rest
    )
