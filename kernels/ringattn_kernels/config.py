"""Block sizes, warps and pipeline stages of each kernel: one small table, nothing is searched at run time.

Measured on an H200 by `launch/bench sweep`: the entries of sm_90, and, with the instructions of an A100, those of sm_80. The other
architectures scale those choices to their shared memory (64 KB on gfx942).
"""

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class BlockConfig:
    """One program owns `block` rows of its axis and steps through `step` rows of the other at a time, in `parts` (forward only).

    apart: dk and dv in a launch each, for sums that would not fit in the registers together. Scores are then computed twice.
    """

    block: int
    step: int
    num_warps: int
    num_stages: int
    parts: int = 1
    apart: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Of Triton's."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


# (head-dim bucket) -> BlockConfig, for 16-bit inputs; the bucket is the larger of the two padded head dims
_SM90 = {
    "forward": {64: BlockConfig(64, 128, 4, 3, 2), 128: BlockConfig(128, 128, 8, 3, 2), 256: BlockConfig(128, 64, 8, 2)},
    "dkdv": {64: BlockConfig(64, 64, 4, 3), 128: BlockConfig(64, 64, 4, 2), 256: BlockConfig(64, 64, 8, 2)},
    "dq": {64: BlockConfig(64, 64, 4, 3), 128: BlockConfig(128, 64, 8, 3), 256: BlockConfig(128, 32, 8, 3)},
}
# not measured: block sizes that compile without much spilling
_SM100 = {
    "forward": {64: BlockConfig(128, 64, 4, 3), 128: BlockConfig(128, 64, 8, 3), 256: BlockConfig(128, 32, 8, 2)},
    "dkdv": {64: BlockConfig(64, 64, 4, 3), 128: BlockConfig(64, 64, 4, 2), 256: BlockConfig(64, 32, 8, 2)},
    "dq": {64: BlockConfig(64, 64, 4, 3), 128: BlockConfig(128, 64, 8, 3), 256: BlockConfig(128, 32, 8, 2)},
}
# also of `SMALL`, within whose shared memory they stay
_SM80 = {
    "forward": {64: BlockConfig(128, 64, 4, 3), 128: BlockConfig(128, 32, 4, 3), 256: BlockConfig(64, 32, 4, 2)},
    "dkdv": {64: BlockConfig(64, 64, 4, 3), 128: BlockConfig(64, 64, 4, 2), 256: BlockConfig(32, 32, 4, 1)},
    "dq": {64: BlockConfig(128, 32, 4, 3), 128: BlockConfig(128, 32, 4, 2), 256: BlockConfig(32, 64, 4, 1)},
}
# the forward at 128 where dropout, too, wants registers
_SM80_DROPPING = BlockConfig(128, 64, 8, 2)
_GFX942 = {
    "forward": {64: BlockConfig(128, 64, 4, 1), 128: BlockConfig(128, 64, 4, 1), 256: BlockConfig(64, 32, 4, 1)},
    "dkdv": {64: BlockConfig(64, 32, 4, 1), 128: BlockConfig(64, 32, 4, 1), 256: BlockConfig(32, 32, 4, 1)},
    "dq": {64: BlockConfig(64, 32, 4, 1), 128: BlockConfig(64, 32, 4, 1), 256: BlockConfig(32, 32, 4, 1)},
}
# fp32 in three tf32 products on NVIDIA, on the ordinary units of gfx942: small blocks, so that the operands' parts fit in registers
_FP32 = {
    "forward": {64: BlockConfig(64, 32, 4, 2), 128: BlockConfig(32, 32, 4, 2), 256: BlockConfig(32, 16, 4, 1)},
    "dkdv": {64: BlockConfig(32, 32, 4, 1), 128: BlockConfig(32, 16, 4, 1), 256: BlockConfig(16, 16, 4, 1)},
    "dq": {64: BlockConfig(64, 32, 4, 1), 128: BlockConfig(32, 16, 4, 1), 256: BlockConfig(16, 16, 4, 1)},
}
_FP32_GFX942 = {
    "forward": {64: BlockConfig(64, 32, 4, 1), 128: BlockConfig(32, 32, 4, 1), 256: BlockConfig(16, 16, 4, 1)},
    "dkdv": {64: BlockConfig(32, 32, 4, 1), 128: BlockConfig(32, 16, 4, 1), 256: BlockConfig(16, 16, 4, 1)},
    "dq": {64: BlockConfig(32, 32, 4, 1), 128: BlockConfig(32, 16, 4, 1), 256: BlockConfig(16, 16, 4, 1)},
}
# Heads over 256. One gradient of 64 rows, or two of 32, fill the registers.
_WIDE_SM90 = {"forward": BlockConfig(64, 64, 8, 1), "dkdv": BlockConfig(64, 32, 8, 1, apart=True), "dq": BlockConfig(64, 32, 8, 1)}
_WIDE = {"forward": BlockConfig(32, 32, 8, 1), "dkdv": BlockConfig(32, 32, 8, 1, apart=True), "dq": BlockConfig(32, 32, 8, 1)}
_WIDE_SMALL = {"forward": BlockConfig(32, 32, 8, 1), "dkdv": BlockConfig(32, 16, 8, 1, apart=True), "dq": BlockConfig(32, 16, 8, 1)}
_WIDE_GFX942 = {"forward": BlockConfig(32, 16, 4, 1), "dkdv": BlockConfig(32, 16, 4, 1), "dq": BlockConfig(32, 16, 4, 1)}
_WIDE_FP32 = {"forward": BlockConfig(16, 16, 4, 1), "dkdv": BlockConfig(16, 16, 8, 1, apart=True), "dq": BlockConfig(16, 16, 8, 1)}
_WIDE_FP32_GFX942 = {
    "forward": BlockConfig(16, 16, 4, 1),
    "dkdv": BlockConfig(16, 16, 4, 1, apart=True),
    "dq": BlockConfig(16, 16, 4, 1),
}
_INTERPRETER = {"forward": BlockConfig(64, 32, 1, 1, 2), "dkdv": BlockConfig(64, 32, 1, 1), "dq": BlockConfig(64, 32, 1, 1)}
_WIDE_INTERPRETER = _INTERPRETER | {"dkdv": BlockConfig(64, 32, 1, 1, apart=True)}


# chips with 99 KB of shared memory for a program: Ampere's and Ada's for graphics, and Blackwell's
SMALL = frozenset({"sm_86", "sm_89", "sm_120", "sm_121"})


def architecture(device: torch.device) -> str:
    """'sm_90' and so on, 'gfx942' and so on, or 'cpu' (Triton's interpreter).

    It is the one that TRITON_OVERRIDE_ARCH names, if that is set: with sm80, a later GPU runs the instructions of an A100.
    """
    if device.type == "cpu":
        assert triton.knobs.runtime.interpret, "CPU tensors need TRITON_INTERPRET=1"
        return "cpu"
    if (named := overridden()) is not None:
        return named if named.startswith("gfx") else f"sm_{named.removeprefix('sm').rstrip('a')}"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def overridden() -> str | None:
    """What TRITON_OVERRIDE_ARCH names, if it is set."""
    return triton.knobs.runtime.override_arch


def launch_for(kernel: str, arch: str, head_dim: int, dtype: torch.dtype, dropping: bool = False) -> BlockConfig:
    """The entry for `kernel` ('forward', 'dkdv' or 'dq') at the larger of the two head dims. dropping: whether it drops weights."""
    wide = head_dim > 256
    if arch == "cpu":
        return (_WIDE_INTERPRETER if wide else _INTERPRETER)[kernel]
    is_amd, is_fp32 = arch.startswith("gfx"), dtype == torch.float32
    major = 0 if is_amd else int(arch[3:]) // 10
    if wide:
        for_16_bits = _WIDE_GFX942 if is_amd else _WIDE_SM90 if major == 9 else _WIDE_SMALL if arch in SMALL else _WIDE
        for_fp32 = _WIDE_FP32_GFX942 if is_amd else _WIDE_FP32
        return (for_fp32 if is_fp32 else for_16_bits)[kernel]
    if is_amd:
        table = _FP32_GFX942 if is_fp32 else _GFX942
    else:
        table = _FP32 if is_fp32 else {9: _SM90, 10: _SM100}.get(major, _SM80)
    if dropping and table is _SM80 and kernel == "forward" and bucket(head_dim) == 128:
        return _SM80_DROPPING
    return table[kernel][bucket(head_dim)]


def bucket(head_dim: int) -> int:
    """The head dim of the tables' entry for this one, up to 256."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def padded(head_dim: int) -> int:
    """The power of two that a block holds a head dim in; 16 is the least that the matrix units take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision(dtype: torch.dtype, arch: str, head_dim: int) -> str:
    """How `tl.dot` multiplies. fp32 is never rounded to tf32: NVIDIA's units multiply it in three parts, which keeps fp32's error.

    head_dim: the larger of the two. Over 256 the three parts do not fit in the registers, and the ordinary units multiply.
    """
    if dtype != torch.float32:
        return "tf32"  # what the argument is for 16-bit operands, which it does not touch
    return "tf32x3" if arch.startswith("sm_") and head_dim <= 256 else "ieee"


def _is_described(x: torch.Tensor, arch: str) -> bool:
    """Whether the copy engine (TMA) loads rows of x (b, s, h, d)."""
    d = x.shape[3]
    has_engine = arch.startswith("sm_") and int(arch[3:]) >= 90
    aligned = x.data_ptr() % 16 == 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return x.numel() > 0 and has_engine and aligned and d == padded(d) and x.dtype != torch.float32


def described(arch: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of which the copy engine loads rows."""
    return {name: x for name, x in tensors.items() if _is_described(x, arch)}


def descriptor(x: torch.Tensor, rows: int, arch: str) -> TensorDescriptor | None:
    """The descriptor by which the copy engine loads `rows` rows of one head of x (b, s, h, d); None where it does not."""
    if not _is_described(x, arch):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, x.shape[3]])
