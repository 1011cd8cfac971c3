"""Every compiled form of the plain kernels, and the resources of the chip that each takes: registers, stack, spills, shared memory.

    python -m ringattn_kernels.variants --jobs 8 > docs/lab/kernel_resources.md

Nothing here needs a GPU: Triton compiles for an architecture by name, from the same arguments that a launch would pass.
"""

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from . import plain_backward, plain_forward, splits, statistics
from .config import BlockConfig, launch_for, padded
from .gradients import dkdv_kernel, dq_kernel
from .modifiers import Bias, Dropout, Modifiers
from .queries import Queries
from .table import TileTable

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
FORWARD = ("forward", "forward to state", "forward from state", "forward from state to state")
MODIFIED = ("forward modified", "dkdv modified", "dq modified")
KERNELS = (*FORWARD, "merge", "merge from state", "sum", "dkdv", "dq", "delta", "pivot", *MODIFIED)
HEAD_DIMS = (64, 128, 256)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Variant:
    """One kernel in one form; `head_dim` is d and dv."""

    kernel: str
    head_dim: int
    dtype: torch.dtype
    arch: str


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel; bytes, or registers of a thread. `spills` counts instructions on NVIDIA, registers on AMD."""

    registers: int
    stack: int
    spills: int
    shared: int


def all_variants() -> list[Variant]:
    return [Variant(*fields) for fields in itertools.product(KERNELS, HEAD_DIMS, DTYPES, ARCHITECTURES)]


def compile_variant(variant: Variant, launch: BlockConfig | None = None, modifiers: Modifiers | None = None) -> Resources:
    """Compile one variant with its configured `launch`, or with another; a modified one with these modifiers, or with all."""
    kernel, arguments = launch_arguments(variant, launch, modifiers)
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    binary = triton.compile(source(kernel, arguments), target=target(variant.arch), options=options)
    if variant.arch.startswith("gfx"):
        return amd_resources(binary)
    return nvidia_resources(binary)


def target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch[3:]), 32)


def source(kernel: triton.JITFunction, arguments: dict) -> ASTSource:
    """What a launch with these arguments would compile: pointers and strides are multiples of 16, as allocators give them."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def launch_arguments(
    variant: Variant, launch: BlockConfig | None = None, modifiers: Modifiers | None = None
) -> tuple[triton.JITFunction, dict]:
    """The kernel and the arguments of a launch on small tensors, grouped-query, as one would make it on `variant.arch`."""
    b, s, h, hk, d, dtype, arch = 2, 256, 16, 4, variant.head_dim, variant.dtype, variant.arch
    q, dout = torch.empty(b, s, h, d, dtype=dtype), torch.empty(b, s, h, d, dtype=dtype)
    k, v = torch.empty(b, s, hk, d, dtype=dtype), torch.empty(b, s, hk, d, dtype=dtype)
    rows = torch.empty(b, h, s)
    weight = rows if dtype == torch.float32 else None
    if variant.kernel == "delta":
        names = ("out_ptr", "dout_ptr", "delta_ptr", "stride_ob", "stride_os", "stride_oh", "stride_gb", "stride_gs")
        values = (q, dout, rows, *q.stride()[:3], *dout.stride()[:2])
        others = ("row_max_ptr", "row_sum_ptr", "drow_sum_ptr", "pivot_ptr", "negated_ptr", "sums_ptr")
        sizes = {"stride_gh": d, "heads": h, "q_rows": s, "padded_rows": s, "V_DIM": d, "BLOCK_DV": padded(d), "BLOCK_Q": 64}
        return statistics.rows_kernel, dict(zip(names, values)) | dict.fromkeys(others) | sizes | {
            "HEAD_DIM": 1,
            "BLOCK_D": padded(1),
        }
    if variant.kernel == "pivot":
        names = ("row_max_ptr", "row_sum_ptr", "pivot_ptr", "weight_ptr", "count", "BLOCK")
        return statistics.pivot_kernel, dict(zip(names, (rows, rows, rows, weight, b * h * s, 1024)))

    how = splits.Splits(1, torch.empty(4, 2, dtype=torch.int32), 4, 64)
    if variant.kernel == "sum":
        return splits.sum_kernel, splits.sum_arguments(how, 4, q.float(), q, False)[1] | {"num_warps": splits.WARPS}
    if variant.kernel.startswith("merge"):
        partial = (q.float(), rows, rows)
        state = partial if variant.kernel.endswith("from state") else None
        return splits.merge_kernel, splits.merge_arguments(how, 4, partial, state, q, rows, rows)[1]

    name = variant.kernel.split()[0]
    launch = launch or launch_for(name, arch, d, dtype)
    table = TileTable(np.array([(0, s, 0, s, 0, s)]), s, s, np.zeros((1, 2)))
    if variant.kernel in MODIFIED:
        modifiers = modifiers or Modifiers(30.0, torch.empty(b, h), Bias((-9, 9), torch.empty(h, 3)), Dropout(0.1, 1 << 40, 0, h))
    cut = table.key_blocks if name == "dkdv" else table.query_blocks
    blocks = cut(launch.block, launch.step, q.device)
    common = (Queries(q, dout, rows, rows, rows), k, v, table, 0.1, rows, weight, blocks, len(blocks))
    if name == "dkdv":
        return dkdv_kernel, plain_backward.dkdv_arguments(*common, k.float(), v.float(), True, launch, arch, modifiers)
    if name == "dq":
        partial = (
            None if modifiers is None or modifiers.slopes is None else torch.empty(h),
            None if modifiers is None or modifiers.bias is None else torch.empty(h, 3),
        )
        return dq_kernel, plain_backward.dq_arguments(*common, q.float(), True, launch, arch, modifiers, *partial)
    out = q.float() if variant.kernel.endswith("to state") else q
    state = (q.float(), rows, rows) if "from state" in variant.kernel else None
    return plain_forward.forward_kernel, plain_forward.forward_arguments(
        q, k, v, table, out, rows, rows, blocks, len(blocks), 0.1, state, launch, arch, modifiers
    )


def amd_resources(binary) -> Resources:
    """Read off the assembly's own metadata."""
    registers, stack, spills = (
        int(re.search(name + r":\s*(\d+)", binary.asm["amdgcn"])[1])
        for name in (r"\.vgpr_count", "ScratchSize", r"\.vgpr_spill_count")
    )
    return Resources(registers, stack, spills, binary.metadata.shared)


def nvidia_resources(binary) -> Resources:
    """Read off the binary with the tools that Triton's wheel carries."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, assembly = (
            subprocess.run([str(tools / tool), option, file.name], check=True, capture_output=True, text=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = (int(re.search(name + r":(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, len(re.findall(r"\b(?:STL|LDL)\b", assembly)), binary.metadata.shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    columns = [*(field.name for field in fields(Variant)), *(field.name for field in fields(Resources))]
    print("# What the compiled kernels take\n")
    print("Written by `python -m ringattn_kernels.variants`; `spills` counts local loads and stores on NVIDIA, registers on AMD.\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    failed = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        jobs = [(variant, pool.submit(compile_variant, variant)) for variant in all_variants()]
        for variant, job in jobs:
            resources = ("failed",) if job.exception() else astuple(job.result())
            failed += resources == ("failed",)
            row = (variant.kernel, variant.head_dim, TYPES[variant.dtype], variant.arch, *resources)
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
    raise SystemExit(f"{failed} variants failed" if failed else 0)


if __name__ == "__main__":
    main()
