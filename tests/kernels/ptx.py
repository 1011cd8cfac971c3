"""Runs inline assembly of PTX on the CPU, for all 128 threads of a warpgroup at once. It knows just the instructions that our kernels use.

Registers are arrays of one number a thread: uint64 for whole numbers, float32 for those of fp32, bool for predicates.
"""

import re

import numpy as np
import torch

THREADS = np.arange(128)
LOW = np.uint64(0xFFFFFFFF)


def run(assembly: str, operands: list[np.ndarray], memory: np.ndarray | None = None) -> list[np.ndarray]:
    """The operands, each of 128 numbers of 32 or 64 bits as uint64 or float32, after the assembly. memory: fp32, from address 0 on; it is
    added to in place."""
    machine = _Machine({f"${i}": np.array(x) for i, x in enumerate(operands)}, memory)
    machine.run(assembly)
    return [machine.registers[f"${i}"] for i in range(len(operands))]


def floats(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float32 else x.astype(np.uint32).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32).astype(np.uint64) if x.dtype == np.float32 else x


def rounded(x: np.ndarray, to: str) -> np.ndarray:
    """The 16 bits of fp32 numbers."""
    dtype = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}[to]
    return torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint64)


def signed(x: np.ndarray) -> np.ndarray:
    return (x & LOW).astype(np.uint32).view(np.int32).astype(np.int64)


class _Machine:
    def __init__(self, registers: dict[str, np.ndarray], memory: np.ndarray | None) -> None:
        self.registers, self.memory = registers, memory
        self.registers |= {"%laneid": (THREADS % 32).astype(np.uint64), "%tid.x": THREADS.astype(np.uint64)}

    def run(self, assembly: str) -> None:
        text = re.sub(r"//[^\n]*", "", assembly).strip().removeprefix("{").removesuffix("}")
        # a colon ends a label
        lines = [line.strip() for line in re.sub(r"(\w+):", r"\1:;", text).split(";")]
        labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
        at = 0
        while at < len(lines):
            line = lines[at]
            at += 1
            if not line or line.startswith(".reg") or line.endswith(":"):
                continue
            guard = None
            if line.startswith("@"):
                name, line = line.split(maxsplit=1)
                guard = self.registers[name.lstrip("@!")]
                guard = ~guard if "!" in name else guard
            operation, _, rest = line.partition(" ")
            if operation == "bra":
                taken = np.ones(128, bool) if guard is None else guard
                assert taken.all() or not taken.any(), "a branch that threads do not take together"
                at = labels[rest] if taken.all() else at
                continue
            self._step(operation, [x.strip() for x in re.split(r",\s*(?![^{]*})", rest)], guard)

    def _step(self, operation: str, operands: list[str], guard: np.ndarray | None) -> None:
        target, *names = operands
        if operation == "mov.b64":
            low, high = target.strip("{}").split(",")
            (value,) = self._read(names)
            self.registers[low.strip()], self.registers[high.strip()] = value & LOW, value >> np.uint64(32)
            return
        if "|" in target:
            # one predicate for each half of a register
            halves = [_halves(x) for x in self._read(names)]
            found = _compare_halves(operation.split(".")[1], *halves)
            for i, name in enumerate(target.split("|")):
                self.registers[name.strip()] = found[i]
            return
        if operation == "red.global.add.f32":
            address, (added,) = self.registers[target.strip("[]")], self._read(names)
            assert self.memory is not None and (address[guard] % np.uint64(4) == 0).all()
            np.add.at(self.memory, (address[guard] // np.uint64(4)).astype(np.int64), floats(added)[guard])
            return
        if operation == "ld.global.nc.f32":
            address = self.registers[names[0].strip("[]")]
            assert self.memory is not None and (address % np.uint64(4) == 0).all()
            found = self.memory[(address // np.uint64(4)).astype(np.int64)]
        else:
            found = _compute(operation, self._read(names))
        if guard is not None:
            found = np.where(guard, found, self.registers[target])
        self.registers[target] = found

    def _read(self, names: list[str]) -> list[np.ndarray]:
        found = []
        for name in names:
            negated = name.startswith("!")
            value = self.registers[name[negated:]] if name[negated:] in self.registers else _constant(name)
            found.append(~value if negated else value)
        return found


def _constant(name: str) -> np.ndarray:
    if name.startswith("0f"):
        return np.full(128, int(name[2:], 16), np.uint32).view(np.float32)
    return np.full(128, int(name, 0) % 2**64, np.uint64)


def _halves(x: np.ndarray) -> np.ndarray:
    """The lower and the upper 16 bits as fp16: (2, 128)."""
    return np.stack([bits(x) & np.uint64(0xFFFF), bits(x) >> np.uint64(16)]).astype(np.uint16).view(np.float16)


def _compare_halves(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return {"geu": ~(x < y), "neu": ~(x == y)}[kind]


def _compute(operation: str, x: list[np.ndarray]) -> np.ndarray:
    name, *kinds = operation.split(".")
    if operation == "abs.f16x2":
        return bits(x[0]) & np.uint64(0x7FFF7FFF)
    if name == "set" and kinds[1:] == ["u32", "f16x2"]:
        low, high = (y.astype(np.uint64) * np.uint64(0xFFFF) for y in _compare_halves(kinds[0], *(_halves(y) for y in x)))
        return low | high << np.uint64(16)
    if operation == "or.pred":
        return x[0] | x[1]
    if name in ("mov", "shfl", "prmt", "and", "or", "xor", "shl", "shr", "vote", "selp", "lop3"):
        return _on_bits(operation, x)
    if kinds[-1] == "f32" and name != "cvt":
        return _on_floats(name, kinds, [floats(y) for y in x] if name != "setp" else x)
    if operation == "cvt.rn.f32.u32":
        return x[0].astype(np.float32)
    if name == "cvt":
        upper, lower = (rounded(floats(y), kinds[1]) for y in x)
        return lower | upper << np.uint64(16)
    if operation == "mul.wide.u32":
        return (x[0] & LOW) * (x[1] & LOW)
    if operation == "mad.wide.s32":
        return (signed(x[0]) * signed(x[1]) + x[2].astype(np.int64)).astype(np.uint64)
    compare = {"ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal}
    if name == "setp":
        y = x[:2] if kinds[-1] == "u32" else [signed(y) for y in x[:2]]
        found = compare[kinds[0]](*y)
        return found & x[2] if "and" in kinds else found
    y = [signed(z) for z in x]
    whole = {
        "add": lambda: y[0] + y[1],
        "sub": lambda: y[0] - y[1],
        "max": lambda: np.maximum(y[0], y[1]),
        "min": lambda: np.minimum(y[0], y[1]),
        "mul": lambda: y[0] * y[1],
        "mad": lambda: y[0] * y[1] + y[2],
    }
    return whole[name]().astype(np.uint64) & LOW


def _on_bits(operation: str, x: list[np.ndarray]) -> np.ndarray:
    name = operation.split(".")[0]
    if name == "mov":
        return x[0]
    if name == "vote":
        return np.repeat(x[0].reshape(4, 32).any(1), 32)
    if name == "lop3":
        a, b, c, table = (bits(y) for y in x)
        found = np.zeros(128, np.uint64)
        for i in range(8):
            if int(table[0]) >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) & LOW
        return found
    if name == "shfl":
        return x[0][THREADS ^ int(x[1][0])]
    if name == "selp":
        return np.where(x[2], *x[:2])
    x = [bits(y) for y in x]
    if name == "prmt":
        found = np.zeros(128, np.uint64)
        for i in range(4):
            nibble = x[2] >> np.uint64(4 * i) & np.uint64(15)
            both = x[0] & LOW | x[1] << np.uint64(32)
            byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            byte = np.where(nibble & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
            found |= byte << np.uint64(8 * i)
        return found
    if operation == "shr.s32":
        return (signed(x[0]) >> x[1].astype(np.int64)).astype(np.uint64) & LOW
    if name == "shl":
        # nothing is left of a register beyond 31
        x = [np.where(x[1] > np.uint64(31), np.uint64(0), x[0]), np.minimum(x[1], np.uint64(31))]
    operations = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift}
    return operations[name](x[0] & LOW, x[1] & LOW) & LOW


def _on_floats(name: str, kinds: list[str], x: list[np.ndarray]) -> np.ndarray:
    if name == "setp":
        left, right = (floats(y) for y in x[:2])
        return {"gt": left > right, "eq": left == right, "neu": ~(left == right)}[kinds[0]] | (x[2] if "or" in kinds else False)
    with np.errstate(all="ignore"):
        one = np.float32(1)
        operations = {
            "mul": lambda: x[0] * x[1],
            "add": lambda: x[0] + x[1],
            "sub": lambda: x[0] - x[1],
            "max": lambda: np.fmax(x[0], x[1]),
            "abs": lambda: np.abs(x[0]),
            "neg": lambda: -x[0],
            "fma": lambda: (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32),
            "ex2": lambda: np.exp2(x[0]),
            "rcp": lambda: one / x[0],
            "copysign": lambda: np.copysign(x[1], x[0]),
        }
        return operations[name]()
