"""Forward and backward of one GPU beside PyTorch's attention, in the same run.

Work is 4*S*S*H*D operations forward (half when causal) and 2.5 times that backward. A backward counts all that autograd would:
delta, the statistics' units and both kernels. Functions take turns in random order; each figure is the median.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import triton
from timing import interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringattn_kernels as rk

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def add_arguments(parser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full"])
    parser.add_argument("--peers", nargs="+", default=["cudnn"], choices=[*PEERS, "flex"])
    parser.add_argument("--json", type=Path, help="write every figure here")


def main(arguments) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; TFLOP/s forward / backward")
    peers = arguments.peers
    print("| S | D | heads | mask | ringattn | " + " | ".join(peers) + f" | ringattn / {peers[0]} |")
    print("|" + " --- |" * (6 + len(peers)))
    rows = []
    for head_dim in arguments.head_dims:
        for sequence in arguments.sequences:
            for kv_heads in arguments.kv_heads:
                for mask in arguments.masks:
                    shape = (sequence, arguments.heads, kv_heads, head_dim)
                    rates = measure(*shape, mask == "causal", peers)
                    rows.append({"shape": shape, "mask": mask} | rates)
                    cells = [f"{rate['forward']:.0f} / {rate['backward']:.0f}" for rate in rates.values()]
                    ratios = [f"{rates['ringattn'][d] / rates[peers[0]][d]:.2f}" for d in ("forward", "backward")]
                    cells = [sequence, head_dim, f"{arguments.heads}:{kv_heads}", mask, *cells, " / ".join(ratios)]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if arguments.json:
        command = " ".join(["python", *sys.argv])
        header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        arguments.json.write_text(json.dumps(header | {"command": command, "rows": rows}, indent=1))


def measure(sequence: int, heads: int, kv_heads: int, head_dim: int, causal: bool, peers: list[str]) -> dict[str, dict[str, float]]:
    """TFLOP/s of the forward and the backward of each contestant."""
    work = 4 * sequence * sequence * heads * head_dim / (2 if causal else 1)
    torch.manual_seed(0)
    q, dout = (torch.randn(1, sequence, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, sequence, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    contestants = {"ringattn": ours(q, k, v, dout, causal)}
    for peer in peers:
        contestants[peer] = flex(q, k, v, dout, causal) if peer == "flex" else sdpa(q, k, v, dout, causal, PEERS[peer])
    repeats = int(min(9, max(4, 1e14 / work)))
    times = {
        direction: interleaved({name: functions[n] for name, functions in contestants.items()}, repeats)
        for n, direction in enumerate(("forward", "backward"))
    }
    factor = {"forward": 1.0, "backward": 2.5}
    return {name: {d: factor[d] * work / times[d][name] / 1e9 for d in times} for name in contestants}


def ours(q, k, v, dout, causal: bool):
    """(forward, backward) of the kernels."""
    sequence, softmax_scale = q.shape[1], q.shape[3] ** -0.5
    lo = 0 if causal else -sequence
    table = rk.TileTable(np.array([(0, sequence, 0, sequence, lo, sequence)]), sequence, sequence)

    def forward():
        return rk.forward(q, k, v, table, softmax_scale=softmax_scale)

    out, row_max, row_sum = forward()

    def backward():
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        delta = rk.delta(out, dout)
        rk.backward(
            q, k, v, dout, row_max, row_sum, delta, table, softmax_scale=softmax_scale, dq=dq, dk=dk, dv=dv, add=False
        )  # fmt: skip
        return dq, dk, dv

    return forward, backward


def sdpa(q, k, v, dout, causal: bool, backend: SDPBackend):
    """(forward, backward) of torch.nn.functional.scaled_dot_product_attention."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    dout = dout.transpose(1, 2)
    grouped = q.shape[2] != k.shape[2]

    def forward():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def flex(q, k, v, dout, causal: bool):
    """(forward, backward) of FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    dout, sequence = dout.transpose(1, 2), q.shape[1]
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, sequence, sequence) if causal else None
    # the same graph is run backward many times
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention)
    grouped = q.shape[2] != k.shape[2]

    def forward():
        return compiled(*leaves, block_mask=block_mask, enable_gqa=grouped)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
