"""Who takes part in `bench kernels`: this library's kernels, PyTorch's attentions, FlashAttention-4 where it is installed.

Each function takes a case and its tensors, and returns a forward and a backward that can be called again and again.
Shapes: q (1, s, h, d), k (1, sk, hk, d), v (1, sk, hk, d_v), dout (1, s, h, d_v).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn_kernels as rk
from ringattn_kernels import dispatch

from .kernels_cases import KernelCase, PackedCase
from .shared.peers import FLASH4, first, is_installed

# the backward passes that the kernels offer: shown name -> options
BACKWARD_MODES = {"ringattn": {"deterministic": False}, "ringattn deterministic": {"deterministic": True}}

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Passes:
    """Both directions of one contestant on one case."""

    forward: Callable[[], object]
    backward: Callable[[], object]


def tensors(case: KernelCase) -> Tensors:
    """(q, k, v, dout), random."""
    torch.manual_seed(0)
    shapes = (
        (case.tokens, case.heads, case.head_dim),
        (case.keys, case.kv_heads, case.head_dim),
        (case.keys, case.kv_heads, case.v_dim),
        (case.tokens, case.heads, case.v_dim),
    )
    return tuple(torch.randn(1, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def choices(case: KernelCase, inputs: Tensors) -> dict[str, str]:
    """Which of this library's kernels run, and why."""
    q, k, v, dout = inputs
    chosen = {
        "forward": dispatch.choose_forward(q, k, v, case.head_dim**-0.5),
    }
    for name, mode in BACKWARD_MODES.items():
        chosen[name.replace("ringattn", "backward")] = dispatch.choose_backward(q, k, v, dout, case.tiles, **mode)
    return {direction: f"{choice.kernels.name.lower()}: {choice.reason}" for direction, choice in chosen.items()}


def ours(case: KernelCase, inputs: Tensors, splits: int | None = None, **mode: bool) -> Passes:
    """This library's kernels. The backward counts everything that autograd would run: delta, the statistics' units, every kernel."""
    q, k, v, dout = inputs
    softmax_scale, table = case.head_dim**-0.5, case.tiles

    def forward():
        return rk.forward(q, k, v, table, softmax_scale=softmax_scale, splits=splits)

    out, row_max, row_sum = forward()

    def backward():
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
        results = dict(dq=dq, dk=dk, dv=dv, add=False)
        rk.backward(queries, k, v, table, softmax_scale=softmax_scale, splits=splits, **results, **mode)
        return dq, dk, dv

    return Passes(forward, backward)


def sdpa(case: KernelCase, inputs: Tensors, backend: SDPBackend) -> Passes:
    """torch.nn.functional.scaled_dot_product_attention; packed documents as nested tensors."""
    q, k, v, dout = inputs
    grouped = case.heads != case.kv_heads
    if isinstance(case, PackedCase):
        offsets = _offsets(case).long()
        longest = max(case.documents)

        def nested(x):
            jagged = torch.nested.nested_tensor_from_jagged(x[0], offsets, min_seqlen=min(case.documents), max_seqlen=longest)
            return jagged.transpose(1, 2)

        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward():
            with sdpa_kernel(backend):
                return (
                    torch.nn.functional.scaled_dot_product_attention(*map(nested, leaves), is_causal=True).transpose(1, 2).values()
                )

        return _with_grad(forward, leaves, dout[0])
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def forward():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=case.causal, enable_gqa=grouped)

    return _with_grad(forward, leaves, dout.transpose(1, 2))


def cudnn(case: KernelCase, inputs: Tensors) -> Passes:
    """cuDNN through torch."""
    return sdpa(case, inputs, SDPBackend.CUDNN_ATTENTION)


def flash2(case: KernelCase, inputs: Tensors) -> Passes:
    """torch's FlashAttention-2; packed documents through its variable-length call."""
    if not isinstance(case, PackedCase):
        return sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    offsets, longest = _offsets(case), max(case.documents)
    leaves = [x[0].detach().requires_grad_() for x in inputs[:3]]
    return _with_grad(lambda: varlen_attn(*leaves, offsets, offsets, longest, longest, **options), leaves, inputs[3][0])


def flash4(case: KernelCase, inputs: Tensors) -> Passes:
    """FlashAttention-4, written in CuTe."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v, dout = inputs
    if isinstance(case, PackedCase):
        offsets, longest = _offsets(case), max(case.documents)
        leaves = [x[0].detach().requires_grad_() for x in (q, k, v)]
        lengths = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
        return _with_grad(lambda: first(flash_attn_varlen_func(*leaves, **lengths, causal=True)), leaves, dout[0])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return _with_grad(lambda: first(flash_attn_func(*leaves, causal=case.causal)), leaves, dout)


def flex(case: KernelCase, inputs: Tensors) -> Passes:
    """FlexAttention, compiled; documents by a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, dout = inputs
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    block_mask = None
    if isinstance(case, PackedCase):
        lengths = torch.tensor(case.documents, device="cuda")
        document = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)

        def live(b, h, i, j):
            return (i >= j) & (document[i] == document[j])

        block_mask = create_block_mask(live, None, None, case.tokens, case.tokens, _compile=True)
    elif case.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.tokens, case.tokens, _compile=True)
    # each case compiles again, and dynamo compiles one function only so many times
    torch._dynamo.reset()
    # the same graph runs backward many times
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.heads != case.kv_heads
    return _with_grad(lambda: compiled(*leaves, block_mask=block_mask, enable_gqa=grouped), leaves, dout.transpose(1, 2))


def matmul() -> Passes:
    """The practical ceiling: a dense product of 8192^3."""
    a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def multiply():
        return torch.mm(a, b, out=c)

    return Passes(multiply, multiply)


MATMUL_FLOP = 2.0 * 8192**3
PEERS = {"cudnn": cudnn, "flash2": flash2, "flash4": flash4, "flex": flex}


def installed() -> list[str]:
    """The installed peers, without FlexAttention, which compiles every shape again."""
    return ["cudnn", "flash2", *(["flash4"] if is_installed(FLASH4) else [])]


def _offsets(case: PackedCase) -> torch.Tensor:
    """Where each document begins, and the end of the last: int32."""
    return torch.tensor([0, *itertools.accumulate(case.documents)], device="cuda", dtype=torch.int32)


def _with_grad(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> Passes:
    out = forward()
    return Passes(forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
