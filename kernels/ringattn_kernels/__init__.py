"""Triton kernels of exact attention over tile tables. They take tensors and integers, and know no masks, layouts or process groups.

Names are imported at their first use: `ringattn_kernels.table` and `ringattn_kernels.queries` import without Triton.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ahead import TensorKind, prepare_backward, prepare_forward
    from .attention import backward, continued_rows, forward
    from .continued import ContinuedRows
    from .page_table import PageTable
    from .paged import attend_pages, merge_packed
    from .pairs import add_pair, add_rows, rounded_pair, take_rows, zero
    from .partials import merge_rows
    from .queries import Queries
    from .query_sums import QuerySums, ready_queries
    from .recordings import replay
    from .sinks import sinks_gradient, with_sinks
    from .statistics import delta
    from .table import TileTable

__all__ = [
    "ContinuedRows",
    "PageTable",
    "Queries",
    "QuerySums",
    "TensorKind",
    "TileTable",
    "add_pair",
    "add_rows",
    "attend_pages",
    "backward",
    "continued_rows",
    "delta",
    "forward",
    "merge_packed",
    "merge_rows",
    "prepare_backward",
    "prepare_forward",
    "ready_queries",
    "replay",
    "rounded_pair",
    "sinks_gradient",
    "take_rows",
    "with_sinks",
    "zero",
]

_MODULES = {
    "ContinuedRows": "continued",
    "PageTable": "page_table",
    "Queries": "queries",
    "QuerySums": "query_sums",
    "TensorKind": "ahead",
    "TileTable": "table",
    "add_pair": "pairs",
    "add_rows": "pairs",
    "attend_pages": "paged",
    "backward": "attention",
    "continued_rows": "attention",
    "delta": "statistics",
    "forward": "attention",
    "merge_packed": "paged",
    "merge_rows": "partials",
    "prepare_backward": "ahead",
    "prepare_forward": "ahead",
    "ready_queries": "query_sums",
    "replay": "recordings",
    "rounded_pair": "pairs",
    "sinks_gradient": "sinks",
    "take_rows": "pairs",
    "with_sinks": "sinks",
    "zero": "pairs",
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
