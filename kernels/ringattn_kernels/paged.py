"""Attention of a few queries of each sequence to keys in pages: its configurations, launches and memory; `paged_kernels` has the kernels.

It is split-KV flash-decoding (Dao et al. 2023) over block tables (Kwon et al. 2023).

Shapes: b sequences, t query tokens of each, h query heads, hk K/V heads, q (b, t, h, d), k (pages, hk, page_size, d), v (pages, hk,
page_size, dv), out (b, t, h, dv), row_max and row_sum (b, h, t).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.runtime import driver

from . import launches
from .config import SMALL, architecture, bucket, padded, precision
from .direct import hooked
from .launches import Repeat, strides
from .modifiers import Modifiers
from .page_table import NO_WINDOW, PageTable
from .paged_kernels import merge_pages_kernel, merge_ranks_kernel, paged_kernel
from .recorder import recorder
from .splits import State, multiprocessors
from .units import LOG2_E

MERGE_WARPS, TOGETHER = 4, 16  # of a program that merges ranks' partials: its warps, and the partials that it reads at a time
_MOST_TOGETHER = 64
ALIGNED = 16  # bytes: kernels are compiled for addresses that are multiples of it, or for others
_KEPT = 64  # calls that can be repeated


@dataclass(frozen=True)
class PagedConfig:
    """A program holds up to `rows` query rows and loads `keys` keys at a time; a multiprocessor has `programs` of them."""

    rows: int
    keys: int
    programs: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Of Triton's."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


# by head-dim bucket, for 16-bit keys. A multiprocessor holds all its programs at once, by registers and shared memory, with BLOCK_Q = 16.
_SM90 = {64: PagedConfig(64, 64, 3, 4, 4), 128: PagedConfig(64, 64, 2, 4, 4), 256: PagedConfig(32, 32, 2, 4, 4)}
_SM80 = {64: PagedConfig(64, 64, 2, 4, 4), 128: PagedConfig(64, 32, 2, 4, 4), 256: PagedConfig(32, 32, 1, 4, 3)}
_GFX942 = {64: PagedConfig(64, 64, 2, 4, 1), 128: PagedConfig(64, 32, 2, 4, 1), 256: PagedConfig(32, 32, 1, 4, 1)}
_FP32 = {64: PagedConfig(32, 32, 2, 4, 3), 128: PagedConfig(32, 32, 1, 4, 3), 256: PagedConfig(16, 16, 1, 4, 3)}
_FP32_GFX942 = {64: PagedConfig(32, 32, 2, 4, 1), 128: PagedConfig(32, 16, 1, 4, 1), 256: PagedConfig(16, 16, 1, 4, 1)}
# heads over 256
_WIDE_SM90, _WIDE_SM80, _WIDE_GFX942 = PagedConfig(16, 32, 1, 4, 3), PagedConfig(16, 16, 1, 4, 3), PagedConfig(16, 16, 1, 4, 1)
_WIDE_FP32 = PagedConfig(16, 16, 1, 8, 2)
_INTERPRETER = PagedConfig(32, 32, 5, 1, 1)


def paged_config(arch: str, head_dim: int, dtype: torch.dtype) -> PagedConfig:
    """The configuration at the larger of the two head dims."""
    if arch == "cpu":
        return _INTERPRETER
    if head_dim > 256:
        if arch.startswith("gfx"):
            return _WIDE_GFX942
        return _WIDE_FP32 if dtype == torch.float32 else _WIDE_SM80 if _as_sm80(arch) else _WIDE_SM90
    if arch.startswith("gfx"):
        table = _FP32_GFX942 if dtype == torch.float32 else _GFX942
    elif dtype == torch.float32:
        table = _FP32
    else:
        table = _SM80 if _as_sm80(arch) else _SM90
    return table[bucket(head_dim)]


def _as_sm80(arch: str) -> bool:
    return arch in SMALL or int(arch[3:]) < 90


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: PageTable,
    *,
    softmax_scale: float,
    window: int | None = None,
    modifiers: Modifiers | None = None,
    sinks: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    config: PagedConfig | None = None,
) -> State:
    """Attention of the last t tokens of each sequence to the tokens in this rank's pages up to each: (out, row_max, row_sum).

    window: how many tokens before itself a query sees; None: all. modifiers: a softcap and slopes. sinks: (h,), fp32, as in `with_sinks`.
    k and v: contiguous within a head of a page.
    packed: (b * t * h * (dv + 2),), fp32, to leave the three tensors in, in fp32; without it out is in q's dtype.
    """
    slopes = None if modifiers is None else modifiers.slopes
    given = dict(q_ptr=q, k_ptr=k, v_ptr=v, pages_ptr=table.pages, lengths_ptr=table.lengths, first_ptr=table.first)
    given |= {name: x for name, x in (("slopes_ptr", slopes), ("sinks_ptr", sinks), ("packed", packed)) if x is not None}
    addresses, bits = {}, 0
    for name, x in given.items():
        addresses[name] = address = x.data_ptr()
        bits |= address
    numbers = softmax_scale, window, table.ranks, config, None if modifiers is None else (modifiers.softcap, modifiers.placed)
    device = driver.active.get_current_device() if q.is_cuda else None
    key = (device, numbers, *given, *[(x.shape, x.stride(), x.dtype, x.device) for x in given.values()])
    plain = not bits % ALIGNED
    call = _repeated.get(key) if plain else None
    if call is not None and recorder.steps is None and not hooked():
        return call(q, packed, addresses)
    state, call = _attend(q, k, v, table, softmax_scale, window, modifiers, sinks, packed, config)
    if plain and call is not None:
        if len(_repeated) >= _KEPT:
            _repeated.clear()
        _repeated[key] = call
    return state


class _Repeated:
    """A call of `attend_pages` for tensors like those of an earlier call, at other addresses: memory, and two launches."""

    def __init__(self, attend: Repeat, merge: Repeat, partial: int, dv: int) -> None:
        self._attend, self._merge, self._partial, self._dv = attend, merge, partial, dv

    def __call__(self, q: torch.Tensor, packed: torch.Tensor | None, addresses: dict[str, int]) -> State:
        """addresses: of the given tensors, by their names; this adds the others."""
        partial = torch.empty(self._partial, device=q.device, dtype=torch.float32)
        state = _state(q, packed, self._dv)
        addresses["partial_ptr"] = partial.data_ptr()
        addresses["out_ptr"], addresses["row_max_ptr"], addresses["row_sum_ptr"] = (x.data_ptr() for x in state)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        self._attend(addresses, stream)
        self._merge(addresses, stream)
        return state


_repeated: dict[tuple, _Repeated] = {}


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: PageTable, softmax_scale: float, window: int | None,
    modifiers: Modifiers | None, sinks: torch.Tensor | None, packed: torch.Tensor | None, config: PagedConfig | None,
) -> tuple[State, _Repeated | None]:  # fmt: skip
    """`attend_pages`, and what repeats it, if its launches can be repeated."""
    b, t, h, d = q.shape
    hk, page_size, dv = v.shape[1:]
    assert q.dtype == k.dtype == v.dtype and q.stride(3) == k.stride(3) == v.stride(3) == 1 and page_size >= 16 and h % hk == 0
    # a page's rows of a head are contiguous
    assert k.stride(2) == d and v.stride(2) == dv
    assert (
        table.pages.shape[0] == b and table.lengths.is_contiguous() and table.first.is_contiguous() and table.pages.is_contiguous()
    )
    assert modifiers is None or (modifiers.bias is None and modifiers.dropout is None)
    arch = architecture(q.device)
    config = config or paged_config(arch, max(d, dv), q.dtype)
    rows = min(config.rows, padded(t * (h // hk)))
    programs = config.programs * multiprocessors(q.device)
    slots = programs + b * hk * triton.cdiv(t * (h // hk), rows)
    partial = torch.empty(slots * rows * (dv + 2), device=q.device, dtype=torch.float32)
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    moving, make = paged_launch(q, k, v, table, partial, rows, programs, softmax_scale, window, modifiers, config, arch)
    first = paged_kernel, (config, rows, table.ranks), moving, make, config.options
    state = _state(q, packed, dv)
    together, num_warps = merge_form(b * hk * triton.cdiv(t * (h // hk), rows), programs)
    moving, make = merge_launch(q, v, table, partial, rows, programs, window, sinks, state, config, together, arch)
    second = merge_pages_kernel, (config, rows, programs, table.ranks, hk, page_size), moving, make, dict(num_warps=num_warps)
    repeats = []
    for kernel, facts, moving, make, options in (first, second):
        ready = launches.launch(kernel, None, facts, moving, make, **options, **launch_options(arch))
        repeats.append(ready and ready.repeat(moving))
    attend, merge = repeats
    return state, None if attend is None or merge is None else _Repeated(attend, merge, partial.numel(), dv)


def merge_packed(packed: torch.Tensor, q: torch.Tensor, dv: int, sinks: torch.Tensor | None = None) -> State:
    """(out, row_max, row_sum) of all ranks' partials, merged in the order of ranks; out is in q's dtype.

    packed: (ranks, b * t * h * (dv + 2)), what `attend_pages` left on each rank for queries of the shape of q.
    """
    b, t, h, _ = q.shape
    assert packed.is_contiguous() and packed.shape[1] == b * t * h * (dv + 2)
    state = q.new_empty(b, t, h, dv), *_statistics(q)
    moving, make = ranks_launch(packed, q, dv, sinks, state)
    launches.launch(merge_ranks_kernel, None, (tuple(q.shape),), moving, make, num_warps=MERGE_WARPS)
    return state


def merge_form(segments: int, programs: int) -> tuple[int, int]:
    """(partials that a program of `merge_pages_kernel` reads at a time, its warps): a segment's, if segments are about equally long."""
    together = min(1 << (programs // segments + 1).bit_length(), _MOST_TOGETHER)
    return together, 4 if together > 16 else 1


def starts_ahead(arch: str) -> bool:
    """Whether a kernel may be launched while the one before it runs (programmatic dependent launch)."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def _statistics(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for row_max and row_sum."""
    b, t, h, _ = q.shape
    row_max, row_sum = torch.empty(2, b, h, t, device=q.device, dtype=torch.float32)
    return row_max, row_sum


def _state(q: torch.Tensor, packed: torch.Tensor | None, dv: int) -> State:
    """Memory for out, row_max and row_sum."""
    b, t, h, _ = q.shape
    return (q.new_empty(b, t, h, dv), *_statistics(q)) if packed is None else _unpacked(packed, q, dv)


def _unpacked(packed: torch.Tensor, q: torch.Tensor, dv: int) -> State:
    """out, row_max and row_sum as views of one buffer."""
    b, t, h, _ = q.shape
    assert packed.dtype == torch.float32 and packed.shape == (b * t * h * (dv + 2),) and packed.is_contiguous()
    out, row_max, row_sum = packed.split([b * t * h * dv, b * t * h, b * t * h])
    return out.view(b, t, h, dv), row_max.view(b, h, t), row_sum.view(b, h, t)


def _sizes(q: torch.Tensor, v: torch.Tensor, rows: int, programs: int, config: PagedConfig) -> dict[str, int]:
    """Arguments that both kernels of a call take."""
    _, t, h, _ = q.shape
    hk, page_size, dv = v.shape[1:]
    keys = min(config.keys, page_size)
    blocks = triton.cdiv(t * (h // hk), rows)
    counts = dict(sequences=q.shape[0], tokens=t, row_blocks=blocks, KV_HEADS=hk, GROUP=h // hk)
    return counts | dict(
        V_DIM=dv,
        BLOCK_DV=padded(dv),
        BLOCK_Q=rows,
        BLOCK_K=keys,
        PAGE=page_size,
        BLOCK_B=1 << (q.shape[0] - 1).bit_length(),
        PROGRAMS=programs,
    )


def paged_launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: PageTable, partial: torch.Tensor, rows: int, programs: int,
    softmax_scale: float, window: int, modifiers: Modifiers | None, config: PagedConfig, arch: str,
) -> tuple:  # fmt: skip
    """What moves, and the function that makes the grid and all arguments, of a launch of `paged_kernel`."""
    slopes = None if modifiers is None else modifiers.slopes
    sizes = _sizes(q, v, rows, programs, config)
    moving = dict(
        q_ptr=q, k_ptr=k, v_ptr=v, partial_ptr=partial, slopes_ptr=slopes, scale=softmax_scale * LOG2_E.value, window=window
    )
    moving |= dict(pages_ptr=table.pages, lengths_ptr=table.lengths, first_ptr=table.first)
    moving |= dict(cap=None if modifiers is None or modifiers.softcap is None else float(modifiers.softcap))

    def make() -> tuple:
        arguments = dict(
            **strides(q=q),
            **{f"stride_{name}{axis}": x.stride(dim) for name, x in (("k", k), ("v", v)) for axis, dim in (("b", 0), ("h", 1))},
            slots=partial.numel() // (rows * (sizes["V_DIM"] + 2)),
            width=table.pages.shape[1],
            ranks=table.ranks,
            slopes_stride=0 if slopes is None or len(slopes) == 1 else slopes.stride(0),
            HEAD_DIM=q.shape[3],
            BLOCK_D=padded(q.shape[3]),
            PRECISION=precision(q.dtype, arch, max(q.shape[3], v.shape[3])),
            MODIFIED=modifiers is not None,
        )
        return programs, moving | sizes | arguments | dict(AHEAD=starts_ahead(arch))

    return moving, make


def merge_launch(
    q: torch.Tensor, v: torch.Tensor, table: PageTable, partial: torch.Tensor, rows: int, programs: int, window: int,
    sinks: torch.Tensor | None, state: State, config: PagedConfig, together: int, arch: str,
) -> tuple:  # fmt: skip
    """The same of a launch of `merge_pages_kernel`."""
    moving = dict(partial_ptr=partial, out_ptr=state[0], row_max_ptr=state[1], row_sum_ptr=state[2], sinks_ptr=sinks, window=window)
    moving |= dict(lengths_ptr=table.lengths, first_ptr=table.first)
    b, t, h, _ = q.shape
    sizes = _sizes(q, v, rows, programs, config)

    def make() -> tuple:
        slots = partial.numel() // (rows * (sizes["V_DIM"] + 2))
        arguments = dict(slots=slots, ranks=table.ranks, TOGETHER=together)
        return b * t * h, moving | sizes | arguments | dict(AHEAD=starts_ahead(arch))

    return moving, make


def launch_options(arch: str) -> dict[str, bool]:
    """What Triton is told of an early start of both kernels."""
    return {"launch_pdl": True} if starts_ahead(arch) else {}


def ranks_launch(packed: torch.Tensor, q: torch.Tensor, dv: int, sinks: torch.Tensor | None, state: State) -> tuple:
    """The same of a launch of `merge_ranks_kernel`."""
    moving = dict(packed_ptr=packed, out_ptr=state[0], row_max_ptr=state[1], row_sum_ptr=state[2], sinks_ptr=sinks)
    b, t, h, _ = q.shape

    def make() -> tuple:
        sizes = dict(ranks=len(packed), tokens=t, heads=h, V_DIM=dv, BLOCK_DV=padded(dv), TOGETHER=TOGETHER)
        return b * t * h, moving | sizes

    return moving, make
