"""A process of `bench versions`: reads messages, one JSON object a line, and answers each with a line of JSON.

The version is whatever `ringattn` its path leads to; with cuDNN as the argument, PyTorch's attention takes its place.

    compile  both passes of a case, once
    sum      the sum of absolute values of each result of a direction
    time     microseconds a call, of `calls` calls one after the other behind one that is not timed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import torch

Passes = dict[str, Callable[[], tuple[torch.Tensor, ...]]]


def serve(
    lines: Iterable[str], answers: TextIO, make: Callable[[dict], Passes], clock: Callable[[Callable[[], object], int], float]
) -> None:
    """make: both passes of a case. clock: microseconds a call."""
    held: dict | None = None
    passes: Passes = {}
    for line in lines:
        message = json.loads(line)
        if held != message["case"]:
            passes = {}  # what they hold goes before more comes
            held, passes = message["case"], make(message["case"])
        if message["do"] == "compile":
            result: Any = [len(passes[direction]()) for direction in ("forward", "backward")]
            held, passes = None, {}
        elif message["do"] == "sum":
            result = [x.double().abs().sum().item() for x in passes[message["direction"]]()]
        else:
            result = clock(passes[message["direction"]], message["calls"])
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def tensors(case: dict, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """(q, k, v, dout), random, the same in each process; half precision with many sequences, else bfloat16."""
    torch.manual_seed(0)
    b, s, h, hk, d, dv = (case[name] for name in ("batch", "tokens", "heads", "kv_heads", "head_dim", "v_dim"))
    dtype = torch.float16 if b > 1 else torch.bfloat16
    return tuple(torch.randn(b, s, *shape, device=device, dtype=dtype) for shape in ((h, d), (hk, d), (hk, dv), (h, dv)))


def passes_of(
    call: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], dout: torch.Tensor, deterministic: bool
) -> Passes:
    """The forward alone, without a graph, and the backward alone."""
    out = call()

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    def backward() -> tuple[torch.Tensor, ...]:
        torch.use_deterministic_algorithms(deterministic)
        try:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)

    return dict(forward=forward, backward=backward)


def ours(case: dict, device: str = "cuda") -> Passes:
    import ringattn as ra

    *inputs, dout = tensors(case, device)
    leaves = tuple(x.requires_grad_() for x in inputs)
    heads, tokens = case["heads"], case["tokens"]
    masks = dict(
        causal=ra.causal,
        full=ra.full,
        window=lambda: ra.sliding_window(max(1, tokens // 16)),
        documents=lambda: ra.documents(lengths=case["lengths"]),
    )
    scores = dict(
        softcap=lambda: ra.score(softcap=30.0),
        alibi=lambda: ra.score(alibi=ra.alibi_slopes(heads).to(device)),
        dropout=lambda: ra.score(dropout=0.1),
    )
    options = dict(score=scores[case["score"]]()) if case["score"] else {}
    mask = masks[case["mask"]]()
    return passes_of(lambda: ra.ring_attention(*leaves, mask=mask, **options), leaves, dout, case["deterministic"])


def cudnn(case: dict) -> Passes:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    *inputs, dout = tensors(case)
    leaves = tuple(x.requires_grad_() for x in inputs)

    def call() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=case["mask"] == "causal", enable_gqa=case["heads"] != case["kv_heads"]
            )
        return out.transpose(1, 2)

    return passes_of(call, leaves, dout, False)


def device_time(function: Callable[[], object], calls: int) -> float:
    """By CUDA events, behind a call that is not timed."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls * 1000


if __name__ == "__main__":
    # this folder: its kernels.py would hide a package of that name
    sys.path.pop(0)
    # whatever prints does not disturb the answers
    answers, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, answers, cudnn if sys.argv[1:] else ours, device_time)
