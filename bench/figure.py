"""One figure: a measured value beside the limit it is held against."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """value and against have the same unit and come from the same run.

    ratio is "higher is better": value / against for a rate, against / value for
    a time or a size. want is the least ratio that is good enough; 0 means that
    the figure is only reported.

    pairs, where there are any, are the limit measured in turn with each sample;
    then ratio is the median of the ratios of the pairs, so that a machine whose
    speed drifts during the run does not matter."""

    name: str
    unit: str
    against_name: str
    samples: tuple[float, ...]
    against: float
    less_is_better: bool
    want: float
    pairs: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each sample."""
        limits = self.pairs or (self.against,) * len(self.samples)
        pairs = zip(limits, self.samples) if self.less_is_better else zip(self.samples, limits)
        return tuple(better / worse if worse > 0 else float("inf") for better, worse in pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ok(self) -> bool:
        return self.ratio >= self.want

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "against": self.against,
            "against_name": self.against_name,
            "ratio": round(self.ratio, 4),
            "ratio_min": round(min(self.ratios), 4),
            "ratio_max": round(max(self.ratios), 4),
            "want": self.want,
            "ok": self.ok,
            "runs": len(self.samples),
            "median": self.value,
            "min": min(self.samples),
            "max": max(self.samples),
        }


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-int(share * len(ordered) * 1000) // 1000) - 1)]
