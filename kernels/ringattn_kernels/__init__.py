"""Triton kernels of exact attention over tile tables: they know tensors and integers, no masks, layouts or process groups."""

from .backward import backward, delta
from .forward import forward
from .query_sums import QuerySums
from .table import TileTable

__all__ = ["QuerySums", "TileTable", "backward", "delta", "forward"]
