"""Searches as Prometheus metrics: ``SearchMetrics().attach(searcher.ranker)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from plaid_tilemaxsim.stats import SearchStats

NAMESPACE = "plaid_tilemaxsim"
LABELS = ("mode", "codec", "placement")
SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class SearchMetrics:
    """Counts what scorers report of their searches, by mode, codec and placement; ``SearchStats`` says what these are.

    registry: where the metrics go; None: prometheus_client's own, which its HTTP server and others show.
    Stages and candidates are known only of searches with the scorer option ``stats``.
    Raises ImportError without prometheus_client, ValueError if the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Histogram
        except ImportError:
            raise ImportError(
                "prometheus_client is not installed here; pip install 'plaid-tilemaxsim[metrics]'"
            ) from None
        registry = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*LABELS, *labels), namespace=NAMESPACE, registry=registry)

        self._seconds = Histogram(
            "search_seconds", "Time of a search, or of a batch of them, from the encoded queries to their results",
            LABELS, namespace=NAMESPACE, registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self._queries = counter("queries", "Queries searched")
        self._results = counter("results", "Passages returned")
        self._candidates = counter("candidates", "Passages out of candidate generation, where measured")
        self._stages = counter("stage_seconds", "Time in each stage, where measured", "stage")

    def attach(self, scorer: Any) -> None:
        """Observes every search of a TileMaxSimScorer from now on, instead of what its ``on_search`` was before."""
        scorer.on_search = self.observe

    def observe(self, stats: SearchStats) -> None:
        """Adds one search or batch of searches. Safe to call from several threads."""
        labels = (stats.mode, stats.codec, stats.placement)
        self._seconds.labels(*labels).observe(stats.seconds)
        self._queries.labels(*labels).inc(stats.queries)
        self._results.labels(*labels).inc(stats.results)
        if stats.candidates is not None:
            self._candidates.labels(*labels).inc(stats.candidates)
        for stage, seconds in stats.stages.items():
            self._stages.labels(*labels, stage).inc(seconds)
