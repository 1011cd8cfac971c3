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

from . import launches, paged, plain_backward, plain_forward, splits, statistics
from .config import SMALL, BlockConfig, launch_for, padded
from .gradients import dkdv_kernel, dq_kernel
from .modifiers import Bias, Dropout, Modifiers
from .page_table import PageTable
from .queries import Queries
from .table import TileTable

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024} | dict.fromkeys(
    SMALL, 99 * 1024
)
FORWARD = ("forward", "forward to state", "forward from state", "forward from state to state")
MODIFIED = ("forward modified", "dkdv modified", "dk modified", "dv modified", "dq modified")
PAGED = ("paged", "paged scored", "merge pages", "merge ranks")
_OF_KEYS = ("dkdv", "dk", "dv")  # forms of one kernel
KERNELS = (
    *FORWARD,
    "merge",
    "merge from state",
    "sum",
    "dkdv",
    "dk",
    "dv",
    "dq",
    "delta",
    "delta and pivot",
    "pivot",
    *MODIFIED,
    *PAGED,
)
ABOUT = """\
Written by `python -m ringattn_kernels.variants`. Registers are those of a thread; stack and shared memory are in bytes; `spills` counts
local loads and stores on NVIDIA, registers on AMD. Kernels called modified have all parts of a score at once: softcap, ALiBi, bias and
dropout. `delta` and `delta and pivot` are one kernel, `rows_kernel`, without and with what the Hopper backward reads of rows.

On sm_90 no 16-bit `forward` spills up to head dim 128, and up to 256 every modified kernel spills but the fp32 forward at head dim 64.
"""
HEAD_DIMS = (64, 128, 256, 512)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
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
    """Those that a launch may make: dk and dv together or apart."""
    variants = [Variant(*fields) for fields in itertools.product(KERNELS, HEAD_DIMS, DTYPES, ARCHITECTURES)]
    return [
        variant
        for variant in variants
        if (name := variant.kernel.split()[0]) not in _OF_KEYS
        or (name != "dkdv") == launch_for("dkdv", variant.arch, variant.head_dim, variant.dtype).apart
    ]


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
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
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
    if variant.kernel in PAGED:
        return paged_arguments(variant)
    if variant.kernel.startswith("delta"):
        names = ("row_max_ptr", "row_sum_ptr", "drow_sum_ptr", "pivot_ptr", "negated_ptr", "sums_ptr")
        all_asked, head_dim = (rows, d) if variant.kernel == "delta and pivot" else (None, 1)
        sizes = dict(heads=h, q_rows=s, padded_rows=s, V_DIM=d, BLOCK_DV=padded(d), BLOCK_Q=64)
        sizes |= dict(HEAD_DIM=head_dim, BLOCK_D=padded(head_dim))
        tensors = dict(out_ptr=q, dout_ptr=dout, delta_ptr=rows) | dict.fromkeys(names, all_asked)
        return statistics.rows_kernel, tensors | launches.strides(o=q, g=dout) | sizes
    if variant.kernel == "pivot":
        names = ("row_max_ptr", "row_sum_ptr", "pivot_ptr", "weight_ptr", "count", "BLOCK")
        return statistics.pivot_kernel, dict(zip(names, (rows, rows, rows, weight, b * h * s, 1024)))

    how = splits.Splits(1, torch.empty(4, 2, dtype=torch.int32), 4, 64)
    if variant.kernel == "sum":
        pair = (q.float(), q.float()), (q, q.clone())
        return splits.sum_kernel, splits.sum_arguments(how, 4, *pair, False)[1] | {"num_warps": splits.WARPS}
    if variant.kernel.startswith("merge"):
        partial = (q.float(), rows, rows)
        state = partial if variant.kernel.endswith("from state") else None
        arguments = splits.merge_arguments(how, 4, partial, state, q, rows, rows)[1]
        return splits.merge_kernel, arguments | {"num_warps": splits.WARPS}

    name = variant.kernel.split()[0]
    launch = launch or launch_for("dkdv" if name in _OF_KEYS else name, arch, d, dtype, variant.kernel in MODIFIED)
    table = TileTable(np.array([(0, s, 0, s, 0, s)]), s, s, np.zeros((1, 2)))
    if variant.kernel in MODIFIED:
        modifiers = modifiers or Modifiers(30.0, torch.empty(b, h), Bias((-9, 9), torch.empty(h, 3)), Dropout(0.1, 1 << 40, 0, h))
    cut = table.key_blocks if name in _OF_KEYS else table.query_blocks
    blocks = cut(launch.block, launch.step, q.device)
    common = (Queries(q, dout, rows, rows, rows), k, v, table, 0.1, rows, weight, blocks, len(blocks))
    if name in _OF_KEYS:
        gradients = "both" if name == "dkdv" else name
        arguments = plain_backward.dkdv_arguments(*common, k.float(), v.float(), True, launch, arch, modifiers, gradients)
        return dkdv_kernel, arguments | launch.options
    if name == "dq":
        partial = (
            None if modifiers is None or modifiers.slopes is None else torch.empty(h),
            None if modifiers is None or modifiers.bias is None else torch.empty(h, 3),
        )
        arguments = plain_backward.dq_arguments(*common, q.float(), True, launch, arch, modifiers, *partial)
        return dq_kernel, arguments | launch.options
    out = q.float() if variant.kernel.endswith("to state") else q
    state = (q.float(), rows, rows) if "from state" in variant.kernel else None
    arguments = plain_forward.forward_arguments(
        q, k, v, table, out, rows, rows, blocks, len(blocks), 0.1, state, launch, arch, modifiers
    )
    return plain_forward.forward_kernel, arguments | launch.options


def paged_arguments(variant: Variant, config: paged.PagedConfig | None = None) -> tuple[triton.JITFunction, dict]:
    """The same for keys in pages of 64 rows, with its configuration or another."""
    b, t, h, hk, d, dtype, arch = 2, 1, 16, 4, variant.head_dim, variant.dtype, variant.arch
    q, k = torch.empty(b, t, h, d, dtype=dtype), torch.empty(8, hk, 64, d, dtype=dtype)
    sinks = torch.empty(h)
    state = torch.empty_like(q), torch.empty(b, h, t), torch.empty(b, h, t)
    if variant.kernel == "merge ranks":
        packed = torch.empty(2, b * t * h * (d + 2))
        return paged.merge_ranks_kernel, paged.ranks_launch(packed, q, d, sinks, state)[1]()[1] | {"num_warps": paged.MERGE_WARPS}
    config = config or paged.paged_config(arch, d, dtype)
    lengths = torch.empty(b, dtype=torch.int64)
    table = PageTable(lengths, lengths, torch.empty(b, 48, dtype=torch.int32), 2)
    partial = torch.empty(10 * 16 * (d + 2))
    if variant.kernel == "merge pages":
        together, num_warps = paged.merge_form(b * hk, 264)
        launch = paged.merge_launch(q, k, table, partial, 16, 8, paged.NO_WINDOW, sinks, state, config, together, arch)
        return paged.merge_pages_kernel, launch[1]()[1] | {"num_warps": num_warps} | paged.launch_options(arch)
    modifiers = Modifiers(30.0, torch.empty(b, h)) if variant.kernel.endswith("scored") else None
    launch = paged.paged_launch(q, k, k, table, partial, 16, 8, 0.1, paged.NO_WINDOW, modifiers, config, arch)
    return paged.paged_kernel, launch[1]()[1] | config.options | paged.launch_options(arch)


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
    print(ABOUT)
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
