"""Triton kernels of exact attention over tile tables. They take tensors and integers, and know no masks, layouts or process groups.

Names are imported at their first use: `ringattn_kernels.table` and `ringattn_kernels.queries` import without Triton.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import backward, forward
    from .queries import Queries
    from .query_sums import QuerySums, ready_queries
    from .recordings import replay
    from .statistics import delta, with_sinks
    from .table import TileTable

__all__ = ["Queries", "QuerySums", "TileTable", "backward", "delta", "forward", "ready_queries", "replay", "with_sinks"]

_MODULES = {
    "Queries": "queries",
    "QuerySums": "query_sums",
    "TileTable": "table",
    "backward": "attention",
    "delta": "statistics",
    "forward": "attention",
    "ready_queries": "query_sums",
    "replay": "recordings",
    "with_sinks": "statistics",
}


def __getattr__(name: str):
    """Import a public name at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
