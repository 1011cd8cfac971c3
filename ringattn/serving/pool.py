"""`PagePool`: the tensors of one rank's pages, and the group of ranks that share sequences.

Shapes: hk key/value heads, d and d_v head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import check
from ..runtime.context import Context


class PagePool:
    """k (layers, pages + 1, hk, page_size, d) and v (.., d_v): the last page is where a rank puts the rows that others keep."""

    def __init__(
        self,
        context: Context,
        *,
        pages: Any,
        kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        layers: Any,
        page_size: Any,
        dtype: Any,
        device: Any,
    ) -> None:
        """Checks what a user passed; raises ValueError."""
        self.context = context
        if context.hybrid is not None:
            raise ValueError("group is a hybrid of two axes, but a cache is spread over one: pass one axis of the mesh")
        self.pages = check.integer("pages", pages, least=1, most=(1 << 31) - 2)
        self.kv_heads = check.integer("kv_heads", kv_heads, least=1, most=1 << 16)
        self.head_dim = check.integer("head_dim", head_dim, least=1, most=check.MAX_HEAD_DIM)
        v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        self.v_head_dim = check.integer("v_head_dim", v_head_dim, least=1, most=check.MAX_HEAD_DIM)
        self.layers = check.integer("layers", layers, least=1, most=1 << 16)
        self.page_size = check.integer("page_size", page_size, least=16, most=1 << 16)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {page_size}, but must be a power of two")
        self.dtype, place = _kind(dtype, device)
        context.ranks.check_device(place)
        shape = self.layers, self.pages + 1, self.kv_heads, self.page_size
        # zeros: what is not written is finite
        self.k = torch.zeros(*shape, self.head_dim, dtype=self.dtype, device=place)
        self.v = torch.zeros(*shape, self.v_head_dim, dtype=self.dtype, device=place)

    @property
    def device(self) -> torch.device:
        return self.k.device

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Write rows k (..., hk, d) and v (..., hk, d_v) to the pages and slots (2, ...)."""
        pages, rows = slots
        self.k[layer].transpose(1, 2).index_put_((pages, rows), k)
        self.v[layer].transpose(1, 2).index_put_((pages, rows), v)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of all layers to others."""
        if sources:
            there, here = self.sent(sources), self.sent(targets)
            for x in (self.k, self.v):
                x.index_copy_(1, here, x.index_select(1, there))

    def sent(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Integers, on the device; the host does not wait for it."""
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(self.device, non_blocking=True)

    def check_layer(self, layer: Any) -> int:
        """The number of a layer. Raises ValueError if there is no such layer."""
        return check.integer("layer", layer, most=self.layers - 1)

    def check_rows(self, name: str, x: Any, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless x is a tensor of this shape, of the pool's dtype and device."""
        check.dense_tensor(name, x)
        check.no_transforms(**{name: x})
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be {shape} for this batch and this cache of {self!r}")
        if x.dtype != self.dtype:
            raise ValueError(
                f"{name} has dtype {x.dtype}, but the cache holds {self.dtype}: cast it, or make the cache with that dtype"
            )
        if x.device != self.device:
            raise ValueError(f"{name} is on {x.device}, but the cache is on {self.device}: move it there")

    def __repr__(self) -> str:
        sizes = f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, v_head_dim={self.v_head_dim}, layers={self.layers}"
        return f"pages={self.pages}, page_size={self.page_size}, {sizes}, dtype={self.dtype}"


def _kind(dtype: Any, device: Any) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of pages; None for torch's own."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    check.instance("dtype", dtype, torch.dtype, "pass torch.bfloat16 and the like")
    place = torch.empty(0).device
    if device is not None:
        try:
            place = torch.device(device) if isinstance(device, (str, torch.device)) else None
        except RuntimeError:
            place = None
        if place is None:
            raise ValueError(f"device is {check.shown(device)}, but must be a torch.device, or the name of one")
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {place}, but a cache lies on cpu or cuda devices")
    if dtype not in check.DTYPES or (dtype == torch.float64 and place.type == "cuda"):
        raise ValueError(f"dtype is {dtype}, but must be bfloat16, float16, float32 or (on CPU) float64")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {place}, but this process has no GPU")
    return dtype, place
