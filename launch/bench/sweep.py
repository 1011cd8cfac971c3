"""Times block sizes, warps and stages of the plain kernels, to fill `ringattn_kernels/config.py`.

Each choice is also checked against PyTorch. With TRITON_OVERRIDE_ARCH=sm80 the kernels are those of an A100.
"""

import multiprocessing

import numpy as np
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

import ringattn_kernels as rk
from ringattn_kernels import plain_backward, plain_forward
from ringattn_kernels.config import BlockConfig, architecture
from ringattn_kernels.gradients import dkdv_kernel, dq_kernel
from ringattn_kernels.statistics import pivots

from .shared.timing import milliseconds

# architecture -> kernel -> head dim -> the fields of `BlockConfig`
CANDIDATES = {
    "sm_90": {
        "forward": {
            64: [(128, 128, 4, 2, 2), (128, 128, 4, 3, 2), (128, 128, 8, 3, 2), (128, 256, 8, 2, 2), (64, 128, 4, 2, 2),
                 (64, 128, 4, 3, 2), (128, 64, 4, 3, 1), (128, 64, 4, 3, 2), (128, 64, 4, 4, 1)],
            128: [(128, 128, 8, 2, 2), (128, 128, 8, 3, 2), (128, 128, 8, 3, 1), (128, 64, 8, 4, 2), (64, 64, 4, 2, 2)],
            256: [(128, 64, 8, 2, 2), (128, 64, 8, 2, 1)],
        },
        "dkdv": {
            64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 128, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4)],
            128: [(64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 4)],
            256: [(64, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 3), (32, 64, 4, 1), (64, 16, 8, 4)],
        },
        "dq": {
            64: [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 4), (64, 64, 4, 2)],
            128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4)],
            256: [(128, 64, 8, 1), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 64, 4, 2)],
        },
    },
    "sm_80": {
        "forward": {
            64: [(128, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2, 2)],
            128: [(128, 32, 4, 3), (128, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2)],
            256: [(64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2, 2)],
        },
        "dkdv": {
            64: [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2)],
            128: [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (32, 64, 4, 2), (32, 128, 4, 2), (64, 64, 8, 2)],
            256: [(32, 32, 4, 1), (32, 64, 4, 1), (64, 32, 8, 1), (64, 32, 8, 2), (64, 64, 8, 1)],
        },
        "dq": {
            64: [(128, 32, 4, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3)],
            128: [(128, 32, 4, 2), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2), (128, 64, 8, 2)],
            256: [(32, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (64, 32, 8, 1), (64, 64, 8, 1)],
        },
    },
}  # fmt: skip


def add_arguments(parser) -> None:
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")


class Problem:
    """Inputs, statistics and reference gradients of one (sequence, head dim, mask)."""

    def __init__(self, sequence: int, heads: int, head_dim: int, causal: bool, reference: bool = True):
        shape = (1, sequence, heads, head_dim)
        torch.manual_seed(0)
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        lo = 0 if causal else -sequence
        self.table = rk.TileTable(np.array([(0, sequence, 0, sequence, lo, sequence)]), sequence, sequence)
        self.scale = head_dim**-0.5
        self.work = 4 * sequence * sequence * heads * head_dim / (2 if causal else 1)
        self.pivot = self.delta = torch.zeros(1, heads, sequence, device="cuda")
        if reference:
            leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (self.q, self.k, self.v)]
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            grads = torch.autograd.grad(out, leaves, self.dout.transpose(1, 2))
            self.out, self.dq, self.dk, self.dv = (x.transpose(1, 2).float() for x in (out.detach(), *grads))
            _, row_max, row_sum = rk.forward(self.q, self.k, self.v, self.table, softmax_scale=self.scale)
            self.pivot, _ = pivots(row_max, row_sum, weighted=False)
            self.delta = rk.delta(self.out.to(torch.bfloat16).contiguous(), self.dout)

    def launch(self, kernel: str, config: tuple):
        """(kernel function, programs, arguments and options, tensors written)."""
        launch, arch, device = BlockConfig(*config), architecture(self.q.device), self.q.device
        heads = self.q.shape[2]
        rows = self.table.key_blocks if kernel == "dkdv" else self.table.query_blocks
        blocks = rows(launch.block, launch.step, device)
        if kernel == "forward":
            out, row_max, row_sum = torch.empty_like(self.q), torch.empty_like(self.delta), torch.empty_like(self.delta)
            arguments = plain_forward.forward_arguments(
                self.q, self.k, self.v, self.table, out, row_max, row_sum, blocks, len(blocks), self.scale, None, launch, arch
            )
            return plain_forward.forward_kernel, heads * len(blocks), arguments | launch.options, {"out": out}
        statistics = (self.pivot, self.pivot, self.delta)  # the kernels read only delta of these, and the pivot
        inputs = rk.Queries(self.q, self.dout, *statistics), self.k, self.v, self.table, self.scale
        common = (*inputs, self.pivot, None, blocks, blocks.touched)
        if kernel == "dkdv":
            dk, dv = torch.zeros_like(self.k, dtype=torch.float32), torch.zeros_like(self.v, dtype=torch.float32)
            arguments = plain_backward.dkdv_arguments(*common, dk, dv, True, launch, arch)
            return dkdv_kernel, heads * blocks.touched, arguments | launch.options, {"dk": dk, "dv": dv}
        dq = torch.zeros_like(self.q, dtype=torch.float32)
        arguments = plain_backward.dq_arguments(*common, dq, True, launch, arch)
        return dq_kernel, heads * blocks.touched, arguments | launch.options, {"dq": dq}


def compile_one(job: tuple) -> str:
    """Compile one variant into the cache on disk."""
    kernel, head_dim, config = job
    try:
        function, _, arguments, _ = Problem(256, 32, head_dim, True, reference=False).launch(kernel, config)
        binary = function.warmup(grid=(1,), **arguments)
        return f"shared {binary.metadata.shared}"
    except (OutOfResources, CompilationError) as error:  # a choice that does not fit the GPU is a result too
        return f"{type(error).__name__}: {str(error)[:60]}"


def main(arguments) -> None:
    with multiprocessing.get_context("fork").Pool(arguments.workers) as pool:
        # a process that has used the GPU could not fork
        candidates = CANDIDATES["sm_90" if pool.apply(architecture, (torch.device("cuda"),)) == "sm_90" else "sm_80"]
        jobs = [(kernel, d, c) for kernel, dims in candidates.items() for d in arguments.head_dims for c in dims[d]]
        notes = dict(zip(jobs, pool.map(compile_one, jobs, chunksize=1)))
    for d in arguments.head_dims:
        for causal in (True, False):
            problem = Problem(arguments.sequence, arguments.heads, d, causal)
            for kernel, dims in candidates.items():
                for config in dims[d]:
                    head = f"{kernel:8} d={d} {'causal' if causal else 'full':6} {config}"
                    print(f"{head}: {row(problem, kernel, config)} {notes[kernel, d, config]}", flush=True)


def row(problem: Problem, kernel: str, config: tuple) -> str:
    """The rate, by the operations that the kernel really does, and the largest error against PyTorch relative to the largest value."""
    products = {"forward": 2, "dkdv": 4, "dq": 3}[kernel]
    try:
        function, programs, arguments, results = problem.launch(kernel, config)
        function[(programs,)](**arguments)
        torch.cuda.synchronize()
    except (OutOfResources, CompilationError) as error:
        return f"failed: {type(error).__name__}"
    errors = [float((x.float() - (r := getattr(problem, n))).abs().max() / r.abs().max()) for n, x in results.items()]
    time = milliseconds(lambda: function[(programs,)](**arguments), repeats=7)
    return f"{time:7.3f} ms {problem.work / 2 * products / time / 1e9:5.0f} TFLOP/s error {max(errors):.1e}"
