"""The connector's Prometheus metrics, through vLLM's own hook.

They live in the process that serves ``/metrics``, which holds no cache: all comes
with the statistics of each step. Nothing here may raise, since vLLM calls it
without protection.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from .stats import COUNTERS, DISK_STATES, FAMILIES, STATE, KVTierStats, logger

PREFIX = "kvtier_"

#: Bounds of the histogram of lookup waits, in seconds.
WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)

_WAIT = ("lookup_wait_seconds", "seconds from the first lookup of a request to its answer")
_DISK_STATE = ("disk_state", f"1 for the state the disk is in: {', '.join(DISK_STATES)}")


def names() -> dict[str, str]:
    """Every metric, as Prometheus shows it, with what it says."""
    out = {f"{PREFIX}{name}_total": text for name, text in COUNTERS.items()}
    out |= {f"{PREFIX}{name}_total": text for name, (_, text) in FAMILIES.items()}
    out |= {PREFIX + name: text for name, text in STATE.items()}
    out |= {PREFIX + name: text for name, text in (_WAIT, _DISK_STATE)}
    return out


class KVTierPromMetrics(KVConnectorPromMetrics):
    """One time series a counter and engine; those with a cause, a tier or a place come
    into being with the first event, so that what never failed takes no room."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        _forget_earlier()
        self._engines = {engine: list(values) for engine, values in per_engine.items()}
        self._counters = {
            name: self._each(self._counter_cls(PREFIX + name, text, labelnames=labelnames))
            for name, text in COUNTERS.items()
        }
        self._families = {
            name: self._counter_cls(PREFIX + name, text, labelnames=[*labelnames, label])
            for name, (label, text) in FAMILIES.items()
        }
        self._gauges = {
            name: self._each(self._gauge(name, text, labelnames)) for name, text in STATE.items()
        }
        self._disk_state = self._gauge(*_DISK_STATE, [*labelnames, "state"])
        self._waits = self._each(
            self._histogram_cls(PREFIX + _WAIT[0], _WAIT[1], labelnames=labelnames, buckets=WAIT_BUCKETS)
        )

    def _gauge(self, name: str, text: str, labelnames: list[str]) -> Any:
        # The newest, when several processes serve /metrics.
        return self._gauge_cls(PREFIX + name, text, labelnames=labelnames, multiprocess_mode="mostrecent")

    def _each(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self._engines.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            self._observe(KVTierStats(data=transfer_stats_data), engine_idx)
        except Exception as e:
            logger.warning_once("kvtier: metrics are incomplete: %s", f"{type(e).__name__}: {e}")

    def _observe(self, stats: KVTierStats, engine: int) -> None:
        labels = self._engines[engine]
        for name, n in stats.counters().items():
            family, _, value = name.partition("/")
            if value and family in self._families:
                self._families[family].labels(*labels, value).inc(n)
            elif name in self._counters:
                self._counters[name][engine].inc(n)
        for seconds, n in stats.waits.items():
            for _ in range(n):
                self._waits[engine].observe(seconds)
        for name, value in stats.now.items():
            if name in self._gauges:
                self._gauges[name][engine].set(value)
        if (state := stats.now.get("disk_state")) is not None:
            for i, each in enumerate(DISK_STATES):
                self._disk_state.labels(*labels, each).set(int(i == state))


class NoPromMetrics(KVConnectorPromMetrics):
    """In place of metrics that could not be made: ``MultiConnector`` asserts that there
    are some when there are statistics."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        return


def build(vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> KVConnectorPromMetrics:
    try:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine)
    except Exception as e:
        logger.warning("kvtier: there are no metrics: %s: %s", type(e).__name__, e)
        return NoPromMetrics(vllm_config, metric_types, labelnames, per_engine)


def _forget_earlier() -> None:
    """A second engine object in a process: vLLM takes only its own metrics out."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
