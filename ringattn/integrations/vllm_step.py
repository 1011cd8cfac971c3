"""What vLLM's layers need to know of a step, made once for all of them: pieces of queries, and the slots of new keys and values.

Shapes: b pieces of t queries each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from ringattn_kernels.page_table import PageTable

from .. import check
from ..serving.decoding import MOST_QUERIES

PAGE_SIZES = [16, 32, 64, 128, 256, 512, 1024]


class QueryPieces(NamedTuple):
    """Queries of a step that are attended together: t of each of b pieces of sequences, as rows (b, t) of the step's tokens."""

    rows: torch.Tensor
    table: PageTable


@dataclass(frozen=True)
class RingMetadata(AttentionMetadata):
    """What all layers need to know of a step: pieces of queries, and which new tokens' keys this rank keeps, in which slots."""

    tokens: int
    queries: list[QueryPieces]
    kept: torch.Tensor
    slots: torch.Tensor


class RingMetadataBuilder(AttentionMetadataBuilder[RingMetadata]):
    """Makes a step's `RingMetadata`. Raises ValueError for a configuration or a step that is not honoured."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel, self.page_size = vllm_config.parallel_config, kv_cache_spec.block_size
        self.ranks = parallel.decode_context_parallel_size
        self.rank = get_dcp_group().rank_in_group if self.ranks > 1 else 0
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"block_size is {self.page_size}, but must be a power of two from 16 to 1024")
        if self.ranks > 1 and parallel.cp_kv_cache_interleave_size != self.page_size:
            raise ValueError(
                f"cp_kv_cache_interleave_size is {parallel.cp_kv_cache_interleave_size}, but a block must lie whole on one rank: set it "
                f"to the block_size, {self.page_size}"
            )
        if vllm_config.kv_transfer_config is not None:
            raise ValueError("kv_transfer_config is given, but blocks hold the keys before the values of a head: leave it out")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RingMetadata:
        """From vLLM's description of the step."""
        step = common_attn_metadata
        if step.causal is not True:
            raise ValueError(f"causal is {check.shown(step.causal)}, but ringattn's pages take causal attention alone")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(step, name) is not None:
                raise ValueError(f"{name} is given, but ringattn's pages take causal attention and windows alone")
        starts = step.query_start_loc_cpu.tolist()
        # by their number of queries: the first row of each piece, its sequence, and how many queries of the sequence follow it
        pieces: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for sequence, (begin, end) in enumerate(zip(starts, starts[1:])):
            for first in range(begin, end, MOST_QUERIES):
                last = min(first + MOST_QUERIES, end)
                pieces[last - first].append((first, sequence, end - last))
        lengths = step.seq_lens.to(torch.int64)
        queries = []
        for tokens, found in pieces.items():
            rows, sequences, after = torch.tensor(found).to(self.device, non_blocking=True).unbind(1)
            pages = step.block_table_tensor.index_select(0, sequences)
            # a piece sees what its sequence held when the piece was its end
            table = PageTable(lengths[sequences] - after, torch.full_like(after, self.rank), pages, self.ranks)
            queries.append(QueryPieces(rows[:, None] + torch.arange(tokens, device=self.device), table))
        # slots of tokens that other ranks keep, and of padding, are -1
        slots = step.slot_mapping[: step.num_actual_tokens]
        kept = (slots >= 0).nonzero()[:, 0]
        return RingMetadata(starts[-1], queries, kept, slots[kept])
