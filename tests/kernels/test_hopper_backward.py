"""The Hopper gradient kernels: what the compiler makes of them, without a GPU; on one, accuracy and bits over random tables."""

import collections
import contextlib
import inspect
import io
import itertools
import logging
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import ringattn_kernels as rk
from ringattn_kernels import dispatch
from ringattn_kernels import launches as kernel_launches
from ringattn_kernels.dispatch import Kernels, choose_backward, choose_forward
from ringattn_kernels.hopper import backward, dq_sums, fused, threads, work_queue
from ringattn_kernels.hopper.panels import main_columns
from ringattn_kernels.hopper.statistics import PaddedStatistics
from ringattn_kernels.hopper.turns import key_turns
from ringattn_kernels.launches import parted
from ringattn_kernels.modifiers import Modifiers
from tests.kernels import dense, fuzz, ptx

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
}
# bytes that a thread may spill: addresses, of which two are read within the loop of the query kernel, two in that of the fused one at head
# dim 64, and a few at 192; it holds most between works
SPILLS = {("key", 64): 0, ("key", 128): 72, ("query", 64): 0, ("query", 128): 56, ("fused", 64): 100, ("fused", 128): 164}
SPILLS |= {("fused", 96): 20, ("fused", 192): 308, ("wide key", 256): 0, ("query", 256): 16}
# behind the loop, and of the partition that loads
SPILLS |= {("owned", 64): 0, ("owned", 96): 28, ("owned", 128): 188}
SPILLS |= {("ordered", 64): 24, ("ordered", 96): 16, ("ordered", 128): 128, ("ordered", 192): 312}
# those whose steps are of 128 rows and not of 64
LONG_STEPS = {("query", 64), ("query", 128), ("fused", 64), ("ordered", 64)}
# where in a warpgroup exponentials come (E), among starts of products (H) and waits for them (D): with products under way, of its
# own but for `consume_values` and where head dims are 192 and 128, that are not waited for before
OVERLAPPED = {"key": r"DH(EH)+D", "query": r"HDED", "fused": r"DH(EH)+D", "ordered": r"DH(EH)+D", "wide key": r"DEH+D"}
# and those of later versions of Triton that spill more; 3.9 takes a newer ptxas and asks it for less effort in allocating registers
MORE_SPILLS = {
    (3, 7): {("query", 128): 64, ("fused", 96): 36, ("fused", 192): 324, ("owned", 96): 48, ("owned", 128): 240},
    (3, 8): {("fused", 96): 44, ("fused", 192): 316, ("owned", 96): 32, ("owned", 128): 232},
    (3, 9): {("key", 128): 172, ("query", 128): 104, ("fused", 64): 348, ("fused", 192): 540, ("owned", 96): 72},
}
MORE_SPILLS[3, 7] |= {("ordered", 64): 564, ("ordered", 96): 160, ("ordered", 128): 376, ("ordered", 192): 1072}
MORE_SPILLS[3, 8] |= {("ordered", 64): 352, ("ordered", 128): 280, ("ordered", 192): 740}
MORE_SPILLS[3, 9] |= {("ordered", 64): 296, ("ordered", 192): 524}
RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
# head dims of v that are not those of q and k
V_DIMS = {192: 128}
# those that are computed as others, and as which
PADDED = {(40, 64): (64, 64), (80, 72): (96, 96), (112, 16): (128, 128), (160, 96): (192, 128), (160, 192): (256, 256)}
SETS = pytest.mark.parametrize(
    ("kernels", "d"),
    [
        *((Kernels.HOPPER, d) for d in (64, 128, 256)),
        *((kernels, d) for kernels in (Kernels.HOPPER_ORDERED, Kernels.HOPPER_FUSED) for d in (64, 96, 128, 192)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")


def signature_of(value) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@dataclass(frozen=True)
class Compiled:
    """What ptxas said of a kernel, the machine code, and bytes of shared memory."""

    log: str
    sass: str
    shared: int

    @property
    def warnings(self) -> list[str]:
        """C7507 setmaxnreg ignored; C7512, C7514 products serialized."""
        return re.findall(r"C75\d\d.*", self.log)

    @property
    def registers(self) -> int:
        """Of a thread as a program begins."""
        return int(re.findall(r"Used (\d+) registers", self.log)[0])

    @property
    def spills(self) -> int:
        """Bytes that a thread writes, or reads back, whichever is more."""
        return max(int(n) for n in re.findall(r"(\d+) bytes spill", self.log))


def compile_for_hopper(kernel, arguments, folder: Path, **options) -> Compiled:
    """Compile with the assembler of the installed Triton, and its options but for these: they differ between its versions."""
    names = kernel.arg_names
    assert set(arguments) == set(names)
    constexprs = {n: arguments[n] for n in names if n.isupper() or arguments[n] is None}
    signature = {n: "constexpr" if n in constexprs else signature_of(arguments[n]) for n in names}
    free = [(i, n) for i, n in enumerate(names) if n not in constexprs]
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in free if n.endswith("_ptr") or n.startswith("stride")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): value for n, value in constexprs.items()}, aligned)
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | options)
    (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    return Compiled(log.getvalue(), sass, binary.metadata.shared)


def cpu_arguments(kernel: str, d: int, dtype, add: bool, result_dtype, v_dim: int | None = None):
    v_dim = v_dim or V_DIMS.get(d, d)
    dims = ((4, d), (2, d), (2, v_dim), (4, v_dim))
    q, k, v, dout = (torch.empty(1, 256, *heads_and_dim, dtype=dtype) for heads_and_dim in dims)
    dq, dk, dv = (torch.empty(x.shape, dtype=result_dtype) for x in (q, k, v))
    table = rk.TileTable(np.array(dense.causal(256)), 256, 256)
    queries = rk.Queries(q, dout, *torch.empty(3, 1, 4, 256))
    inputs = queries, k, v, table, 0.1, PaddedStatistics(*torch.empty(2, 4, 256))
    if kernel == "owned":
        sums, drawn = torch.empty(4, 256, d), torch.empty(3, dtype=torch.int32)
        return fused.fused_kernel, fused.fused_arguments(*inputs, sums, dk, dv, add, drawn, dq=dq)[1]
    if kernel in ("fused", "ordered"):
        sums = torch.empty(fused.shape_of_sums(q, v_dim))
        step = fused.CONFIGS[sums.shape[2]].step
        turns = key_turns(table, 128, step, q.device), torch.empty(4 * 256 // step, dtype=torch.int32)
        options = torch.empty(2, dtype=torch.int32), *(turns if kernel == "ordered" else ())
        return fused.fused_kernel, fused.fused_arguments(*inputs, sums, dk, dv, add, *options)[1]
    if kernel == "wide key":
        return backward.wide_key_kernel, backward.wide_key_arguments(*inputs, dk, dv, add)[1]
    if kernel == "key":
        return backward.key_kernel, backward.key_arguments(*inputs, dk, dv, add)[1]
    return backward.query_kernel, backward.query_arguments(*inputs, dq, add)[1]


# (dtype, add, dtype of results): one launch of several adds, or overwrites what only it knows; one alone writes the final dtype
FORMS = [
    (torch.bfloat16, True, torch.float32),
    (torch.bfloat16, False, torch.float32),
    (torch.bfloat16, False, torch.bfloat16),
    (torch.float16, False, torch.float16),
]


def step_loops(sass: str) -> list[list[str]]:
    """The instructions of both warpgroups' loops over steps: the shortest ones that add to dq."""
    names, labels, found = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\w+)(.*)", line):
            names.append(code[1])
            to = re.search(r"\.L_x_\d+", code[2])
            if code[1] == "BRA" and to and to[0] in labels and "UTMAREDG" in (loop := names[labels[to[0]] :]):
                found.append(loop)
    return sorted(found, key=len)[:2]


def scores_of(loop: list[str]) -> list[str]:
    """From the first to the last product of the next scores, which run while dq is added."""
    start = max(i for i in range(loop.index("UTMAREDG")) if loop[i] == "HGMMA")
    begin = max(i for i in range(start) if loop[i] == "WARPGROUP")
    return loop[begin : start + 1]


def test_threads_that_share_a_row_exchange_what_they_store():
    """A thread has registers of four groups of columns, and then four neighbours of one group; its two rows stay apart."""
    thread = ptx.THREADS.astype(np.uint64)
    held = [1000 * number + thread for number in range(8)]
    found = ptx.run(threads.exchange_assembly(), held)
    for number, got in enumerate(found):
        group, row = number // 2, number % 2
        assert (got == 1000 * (2 * (thread % 4) + row) + thread // 4 * 4 + group).all()


def forms():
    """The fused kernel at head dim 128 in one form; all others are thorough."""
    for kernel in ("key", "query", "fused", "wide key", "ordered", "owned"):
        dims = sorted(d for name, d in SPILLS if name == kernel)
        usual = 128 if 128 in dims else dims[-1]
        for (at, d), (number, form) in itertools.product(enumerate(dims), enumerate(FORMS[2 if kernel == "owned" else 0 :])):
            chosen = number == at % len(FORMS) and d == usual and kernel == "fused"
            yield pytest.param(kernel, d, *form, marks=() if chosen else pytest.mark.thorough)


def padded():
    """Of each pair of kernels one; the others are thorough."""
    for dims, of in PADDED.items():
        chosen = of in ((96, 96), (256, 256))
        yield pytest.param(dims, of, id=str(dims), marks=() if chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("dims", "of"), list(padded()))
def test_head_dims_in_between_are_computed_as_the_next_larger_ones(dims, of, tmp_path):
    for kernel in ("wide key", "query") if of == (256, 256) else ("fused", "ordered"):
        found, whole = (
            compile_for_hopper(*cpu_arguments(kernel, d, torch.bfloat16, False, torch.bfloat16, v_dim), tmp_path)
            for d, v_dim in (dims, of)
        )
        assert not found.warnings
        assert found.spills <= MORE_SPILLS.get(RELEASE, {}).get((kernel, of[0]), SPILLS[kernel, of[0]])
        assert (found.shared, found.sass.count("HGMMA")) == (whole.shared, whole.sass.count("HGMMA"))


@pytest.mark.parametrize(("kernel", "d", "dtype", "add", "result_dtype"), list(forms()), ids=str)
def test_the_compiler_keeps_products_asynchronous_and_registers_unspilled(kernel, d, dtype, add, result_dtype, tmp_path):
    compiled = compile_for_hopper(*cpu_arguments(kernel, d, dtype, add, result_dtype), tmp_path)
    assert not compiled.warnings
    assert compiled.spills <= MORE_SPILLS.get(RELEASE, {}).get((kernel, d), SPILLS[kernel, d])
    assert compiled.shared <= 227 * 1024
    sass = compiled.sass
    operations = re.findall(r"\b(HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR)", sass)
    runs = [name for name, _ in itertools.groupby(operations)]
    # exponentials start with products under way, and end before those are waited for
    exponentials = "".join({"HGMMA": "H", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "D"}[name] for name in runs)
    overlapped = r"DEHD" if d == 192 else OVERLAPPED["fused" if kernel == "owned" else kernel]
    if (kernel, d) in (("fused", 64), ("ordered", 64)):
        overlapped = r"DE?H(EH)+D"  # 12 of the 64 come before the products
    # one of the two warpgroups of the wide key kernel alone has scores
    warpgroups = 1 if kernel == "wide key" else 2
    assert len(re.findall(overlapped, exponentials)) == warpgroups, exponentials
    assert operations.count("MUFU.EX2") == warpgroups * (64 if (kernel, d) in LONG_STEPS else 32)
    if kernel == "fused" and d <= 128 and RELEASE == (3, 6):
        for loop in step_loops(sass):
            # the scores' products start one right after the other: no address is moved between two of them
            assert "R2UR" not in scores_of(loop)
            assert loop.count("LDL") <= (2 if d == 64 else 0)
    # the copy engine adds dq, told by each of the two warpgroups, within its loop and behind it, at 192 in two parts; or in turns by the
    # partition that loads, panel by panel
    times = {"fused": 8 if d == 192 else 4, "ordered": 2 if d in (96, 192) else 1, "owned": 4}
    assert len(re.findall(r"\bUTMAREDG", sass)) == times.get(kernel, 0)
    # and stores the first part of a block's sums, and dk and dv in 16 bits
    copied = result_dtype != torch.float32 and kernel in ("fused", "owned") and d in (64, 128)
    assert len(re.findall(r"\bUTMASTG", sass)) == (4 if kernel == "owned" else 0) + (4 if copied else 0)
    if result_dtype != torch.float32 and d <= 128:
        # what threads store in 16 bits leaves 16 bytes at a time; turns are passed on, and the two counters of works are set back, by
        # single numbers
        stores = collections.Counter(re.findall(r"\bSTG\.E\S*", sass))
        wide = {"STG.E.EF.128"} if kernel == "owned" else set() if copied else {"STG.E.128"}
        assert stores.keys() - {"STG.E.STRONG.GPU", "STG.E"} == wide and stores["STG.E"] <= (6 if kernel == "owned" else 4)
    # the ordinary atomics draw a work, in two places where it is a head (later versions of Triton merge these), and count the programs that
    # draw no more
    atomics = {"fused": 2, "ordered": 2, "owned": 4 if RELEASE < (3, 8) else 2}
    assert len(re.findall(r"\b(?:RED|ATOMG?)\b", sass)) == atomics.get(kernel, 0)


def test_a_choice_can_be_overridden_and_has_a_reason():
    q = torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)
    table = rk.TileTable(np.array(dense.causal(8)), 8, 8)
    assert choose_backward(q, q, q, q, table, Kernels.PLAIN).kernels == Kernels.PLAIN
    assert backward.obstacle(q, q, q, q, table) == ""
    unaligned = torch.empty(1, 8, 2, 132, dtype=torch.bfloat16)[..., :128]
    assert "aligned" in backward.obstacle(unaligned, q, q, q, table)
    assert "float32" in backward.obstacle(q.float(), q, q, q, table)
    for tiles in ([], [(0, 8, 0, 8, 8, 9)]):
        assert "no pairs" in backward.obstacle(q, q, q, q, rk.TileTable(np.array(tiles), 8, 8))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_90")


@pytest.fixture
def deterministic_torch():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def launch_anew(kernel, table, facts, moving, make, **options):
    """`launches.launch`, but it keeps nothing."""
    grid, arguments = make()
    parted(list(arguments), arguments, moving)
    kernel[grid if isinstance(grid, tuple) else (grid,)](**arguments, **options)


@pytest.fixture
def launches(hopper, monkeypatch):
    """The (kernel, grid) of each launch, with all arguments checked; nothing runs."""
    found = []

    def run(self, *args, grid, warmup, num_warps=4, maxnreg=None, launch_pdl=False, **kwargs):
        inspect.signature(self.fn).bind(*args, **kwargs)
        found.append((self.fn.__name__, *grid))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(kernel_launches, "launch", launch_anew)
    monkeypatch.setattr(fused, "work_counter", lambda device: torch.zeros(3, dtype=torch.int32))
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 132)
    return found


@pytest.mark.parametrize(
    ("d", "deterministic"),
    [(64, False), (64, True), (96, False), (128, False), (128, True), (192, False), (256, False), (256, True)],
)
def test_one_launch_and_several_take_every_block_that_changes(d, deterministic, launches):
    """Pairs of 2 blocks of keys, of 6 or (d = 256) 11, and of 1 of 3 of queries: others are overwritten, and left out of additions."""
    q, dout = (torch.empty(2, 300, 6, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
    k, v = (torch.empty(2, 700, 2, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
    statistics = torch.empty(3, 2, 6, 300).unbind()
    table = rk.TileTable(np.array([(5, 20, 100, 150, -700, 300)]), 300, 700)
    inputs = rk.Queries(q, dout, *statistics), k, v, table
    options = dict(softmax_scale=0.1, dk=torch.empty(k.shape), dv=torch.empty(v.shape), deterministic=deterministic)

    def launched(dq, add):
        launches.clear()
        rk.backward(*inputs, **options, dq=dq, add=add)
        return launches[:]

    prepare, finish = ("prepare_kernel", 2 * 6 * 3), ("finish_kernel", 2 * 6 * 3 * 2)
    dq, sums = torch.empty(q.shape), rk.QuerySums(q, 0.1)
    if one_pass := d < 256 and not deterministic:
        kernels = [("fused_kernel", 2 * 2 * n) for n in (6, 2)]
        zero = "pair_kernel", 2 * 6 * 384 * d // 64
        assert [launched(dq, add) for add in (False, True)] == [[zero, prepare, kernel, finish] for kernel in kernels]
        # of the queries' statistics several launches make once what they read
        assert [launched(sums, add) for add in (False, True)] == [[zero, prepare, kernels[0]], [kernels[1]]]
    else:
        name, blocks = ("wide_key_kernel", 11) if d == 256 else ("key_kernel", 6)
        keys, queries = [(name, 2 * 2 * n) for n in (blocks, 2)], [("query_kernel", 2 * 6 * n) for n in (3, 1)]
        assert [launched(dq, add) for add in (False, True)] == [[prepare, *pair] for pair in zip(keys, queries)]
        # the first of several launches overwrites dq, whatever it does to dk and dv
        assert [launched(sums, add) for add in (True, False)] == [[prepare, keys[1], queries[0]], [prepare, keys[0], queries[1]]]
    launches.clear()
    assert sums.finish(q.dtype).dtype == q.dtype
    assert launches == ([finish] if one_pass else [])


@pytest.mark.parametrize(("rows", "d", "fit"), [(300, 64, True), (1, 64, False), (128, 128, True)])
def test_what_one_launch_reads_of_its_rows_lies_where_dq_comes(rows, d, fit, launches, monkeypatch):
    """Three numbers a row and head, if dq has room for them; they are apart, and dq is written only after the launch has read them."""
    monkeypatch.setattr(fused, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(rk.hopper, "obstacle", "")
    q, out, dout = (torch.empty(2, rows, 6, d, dtype=torch.bfloat16) for _ in range(3))
    statistics = torch.empty(2, 2, 6, rows).unbind()
    for once in (False, True):
        queries = rk.ready_queries(q, out, dout, *statistics, once=once)
        numbers = (*queries.ready[0], queries.delta)
        sums = rk.QuerySums(q, 0.1, q.dtype, queries)
        rk.backward(
            queries, q, q, rk.TileTable(np.array([(0, rows, 0, rows, -rows, rows)]), rows, rows), softmax_scale=0.1, dq=sums,
            dk=torch.empty_like(q), dv=torch.empty_like(q), add=False,
        )  # fmt: skip
        assert [name for name, _ in launches] == ["rows_kernel", "fused_kernel"]
        dq = sums.finish(q.dtype)
        assert dq.shape == q.shape and dq.dtype == q.dtype
        begins = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in numbers)
        assert all(x.is_contiguous() and not x.data_ptr() % 16 for x in numbers)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(begins))
        inside = dq.data_ptr() <= begins[0][0] and begins[-1][1] <= dq.data_ptr() + dq.nbytes
        assert inside == (once and fit)
        launches.clear()


def test_the_copy_engine_stores_dk_and_dv_where_it_can():
    def stores(q, dk, dv, add=False, modifiers=None, rows=256):
        return fused.stores_by_copy(q, dk, dv, rk.TileTable(np.array(dense.causal(rows)), rows, rows), add, modifiers)

    for d in (64, 96, 128, 192):
        q, v = (torch.empty(1, 256, 2, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
        assert stores(q, q, v) == (d in (64, 128))
    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16)
    sums = q.float()
    # columns of q, k and v side by side, as some models keep their gradients, and the same off the addresses that it takes
    side_by_side, off = q.new_empty(1, 256, 2, 192)[..., 64:128], q.new_empty(1, 256, 2, 196)[..., 64:128]
    odd = q.new_empty(q.numel() + 1)[1:].view(q.shape)
    assert stores(q, side_by_side, q)
    assert not any(stores(q, *pair) for x in (sums, off, odd) for pair in ((x, q), (q, x)))
    assert not stores(q, sums, sums, add=True)
    assert not stores(q, q, q, modifiers=Modifiers(softcap=30.0))
    # works of 17, 33 and 65 steps in the mean, and of twice as many where two query heads share keys
    expected = {(64, 1): [True, True, True], (128, 1): [True, False, False], (128, 2): [False, False, False]}
    for (d, group), copied in expected.items():
        heads = torch.empty(1, 1, 4, d, dtype=torch.bfloat16)
        keys = heads[:, :, : 4 // group]
        assert [stores(heads, keys, keys, rows=n) for n in (2048, 4096, 8192)] == copied


@pytest.mark.parametrize(
    ("batch", "rows", "d", "owned"),
    [
        (66, 300, 64, True),
        (66, 512, 128, True),
        (66, 640, 128, False),  # 3 blocks of keys meet a block of queries in the mean
        (66, 1024, 64, True),
        (66, 1152, 64, False),
        (80, 300, 64, False),  # 160 heads leave a third of the time of 132 multiprocessors unused
        (66, 300, 192, False),
    ],
)
def test_programs_have_heads_for_themselves_where_these_are_many_and_short(batch, rows, d, owned, launches, monkeypatch):
    """They write dq, and zero it before only where no key meets a block of its rows. A few of the rows have no key at all."""
    monkeypatch.setattr(fused, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(rk.hopper, "obstacle", "")
    q, dout = (torch.empty(batch, rows, 4, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
    k, v = q[:, :, :2], dout[:, :, :2]
    out, statistics = torch.empty_like(dout), torch.empty(2, batch, 4, rows).unbind()
    for dead in (0, 100):
        n = rows - dead
        table = rk.TileTable(np.array([(0, n, 0, n, 0, n)]), rows, rows)
        queries = rk.ready_queries(q, out, dout, *statistics, once=True, alone=(k, v, table))
        sums = rk.QuerySums(q, 0.1, q.dtype, queries)
        rk.backward(queries, k, v, table, softmax_scale=0.1, dq=sums, dk=torch.empty_like(k), dv=torch.empty_like(v), add=False)
        dq = sums.finish(q.dtype)
        assert (dq.shape, dq.dtype) == (q.shape, q.dtype)
        names = [name for name, *_ in launches]
        if owned:
            assert names == ["rows_kernel", *(["pair_kernel"] if dead else []), "fused_kernel"]
            assert launches[-1] == ("fused_kernel", 132)
        else:
            assert names == ["rows_kernel", "fused_kernel", "finish_kernel"]
        launches.clear()


def test_long_sequences_need_no_touches_to_be_told_from_short_ones(hopper, monkeypatch):
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(fused, "touches", None)
    q = torch.empty(1, 131072, 128, 64, device="meta", dtype=torch.bfloat16)
    assert not fused.owns_heads(q, q, q, rk.TileTable(np.array(dense.causal(131072)), 131072, 131072))


@pytest.mark.parametrize(
    ("d", "else_"), [(64, Kernels.HOPPER), (96, Kernels.PLAIN), (128, Kernels.HOPPER), (192, Kernels.PLAIN)], ids=str
)
def test_items_take_turns_where_there_are_many(d, else_, hopper):
    def choice(heads, d, rows):
        q, dout = (torch.empty(1, rows, 8, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
        k, v = (torch.empty(1, rows, heads, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
        return choose_backward(q, k, v, dout, rk.TileTable(np.array(dense.causal(4096)), rows, rows), deterministic=True)

    assert choice(8, d, 4096).kernels == Kernels.HOPPER_ORDERED
    few = choice(4, d, 4096)
    assert few.kernels == else_ and "too few items" in few.reason
    # keys that nobody sees count for nothing
    assert choice(4, d, 8192).kernels == else_
    assert choice(8, 256, 4096).kernels == Kernels.HOPPER


@pytest.mark.parametrize("d", [64, 96, 128, 192])
def test_a_launch_of_items_that_take_turns(d, launches):
    q, dout = (torch.empty(2, 300, 6, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
    k, v = (torch.empty(2, 700, 2, dim, dtype=torch.bfloat16) for dim in (d, V_DIMS.get(d, d)))
    table = rk.TileTable(np.array([(5, 20, 100, 150, -700, 300)]), 300, 700)
    inputs = rk.Queries(q, dout, *torch.empty(3, 2, 6, 300)), k, v, table
    options = dict(softmax_scale=0.1, dk=torch.empty(k.shape), dv=torch.empty(v.shape), kernels=Kernels.HOPPER_ORDERED)
    rk.backward(*inputs, **options, dq=torch.empty(q.shape), add=False)
    rk.backward(*inputs, **options, dq=rk.QuerySums(q, 0.1), add=True)
    prepare, finish = ("prepare_kernel", 2 * 6 * 3), ("finish_kernel", 2 * 6 * 3 * 2)
    zero = "pair_kernel", 2 * 6 * 384 * d // 64
    assert launches == [zero, prepare, ("fused_kernel", 2 * 2 * 6), finish, zero, prepare, ("fused_kernel", 2 * 2 * 2)]
    with pytest.raises(ValueError, match=r"splits is 2, but Kernels\.HOPPER_ORDERED splits no block"):
        rk.backward(*inputs, **options, dq=torch.empty(q.shape), splits=2)


@pytest.mark.parametrize(("d", "step"), [(64, 128), (64, 64), (96, 64), (128, 64), (192, 64)])
def test_the_parts_of_dq_fill_its_sums_once(d, step):
    filled = np.zeros(d * step // dq_sums.SUMS.value, int)
    for half, part in itertools.product(range(2), range(2 if d == 192 else 1)):
        panel, first, rows = dq_sums.place_of_dq(d, step, half, part)
        first += panel * main_columns(d) * 64 // dq_sums.SUMS.value
        filled[first : first + rows] += 1
    assert (filled == 1).all()


@pytest.mark.parametrize(("d", "short", "long"), [(64, 4, 2), (96, 4, 2), (128, 4, 1), (192, 4, 1)])
def test_heads_go_side_by_side_unless_they_are_long(d, short, long):
    """By 64 and 512 blocks of keys. Those that take turns always do."""

    def heads(rows, ordered=False):
        q, k, v = (torch.empty(1, n, 1, dim, dtype=torch.bfloat16) for n, dim in ((64, d), (rows, d), (rows, V_DIMS.get(d, d))))
        table = rk.TileTable(np.array(dense.full(64, rows)), 64, rows)
        queries = rk.Queries(q, v[:, :64], *torch.empty(3, 1, 1, 64))
        inputs = queries, k, v, table, 0.1, PaddedStatistics(*torch.empty(2, 1, 128))
        step = fused.CONFIGS[d].step
        turns = (key_turns(table, 128, step, q.device), torch.empty(128 // step, dtype=torch.int32)) if ordered else ()
        sums, counter = torch.empty(1, 128, d), torch.empty(2, dtype=torch.int32)
        return fused.fused_arguments(*inputs, sums, k, v, False, counter, *turns)[1]["chunk"]

    assert (heads(64 * 128), heads(512 * 128)) == (short, long)
    assert heads(512 * 128, ordered=True) == 2


@pytest.mark.parametrize(
    ("d", "v_dim", "fastest", "repeatable"),
    [
        (64, 64, Kernels.HOPPER_FUSED, Kernels.HOPPER),
        (80, 80, Kernels.HOPPER_FUSED, Kernels.PLAIN),
        (96, 96, Kernels.HOPPER_FUSED, Kernels.PLAIN),
        (128, 128, Kernels.HOPPER_FUSED, Kernels.HOPPER),
        (128, 64, Kernels.HOPPER_FUSED, Kernels.PLAIN),
        (192, 128, Kernels.HOPPER_FUSED, Kernels.PLAIN),
        (192, 192, Kernels.HOPPER, Kernels.HOPPER),
        (256, 256, Kernels.HOPPER, Kernels.HOPPER),
        (264, 64, Kernels.PLAIN, Kernels.PLAIN),
    ],
)
def test_deterministic_results_leave_the_fused_kernel_out(d, v_dim, fastest, repeatable, hopper):
    q, v = torch.empty(1, 8, 2, d, dtype=torch.bfloat16), torch.empty(1, 8, 2, v_dim, dtype=torch.bfloat16)
    inputs = (q, q, v, v, rk.TileTable(np.array(dense.causal(8)), 8, 8))
    assert choose_backward(*inputs).kernels == choose_backward(*inputs, deterministic=False).kernels == fastest
    assert choose_backward(*inputs, deterministic=True).kernels == repeatable
    if fastest == Kernels.PLAIN:
        assert f"{d} and {v_dim}" in choose_backward(*inputs).reason


def test_each_choice_is_logged_by_a_name_of_its_own(hopper, caplog):
    q = torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16)
    inputs = (q, q, q, q, rk.TileTable(np.array(dense.causal(4096)), 4096, 4096))
    dispatch._log.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="ringattn_kernels.dispatch"):
        for kernels in Kernels:
            choose_backward(*inputs, kernels=kernels)
        choose_backward(*inputs, deterministic=True)
    *wishes, chosen = [record.getMessage() for record in caplog.records]
    assert wishes == [f"backward runs {kernels.value}: the caller's wish" for kernels in Kernels] and len(set(wishes)) == len(
        wishes
    )
    assert chosen == "backward runs Gluon, for Hopper, in one pass that adds dq in a fixed order: sm_90"


def test_torch_s_switch_asks_for_deterministic_results(hopper, deterministic_torch):
    q = torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)
    inputs = (q, q, q, q, rk.TileTable(np.array(dense.causal(8)), 8, 8))
    assert choose_backward(*inputs).kernels == Kernels.HOPPER
    assert choose_backward(*inputs, deterministic=False).kernels == Kernels.HOPPER_FUSED
    with pytest.raises(ValueError, match=r"HOPPER_FUSED is not deterministic"):
        choose_backward(*inputs, kernels=Kernels.HOPPER_FUSED)


@pytest.mark.parametrize(
    ("dims", "wish", "deterministic", "other"),
    [
        ((256, 256), Kernels.HOPPER_FUSED, False, "HOPPER"),
        ((256, 256), Kernels.HOPPER_ORDERED, True, "HOPPER"),
        ((96, 96), Kernels.HOPPER, False, "HOPPER_FUSED"),
        ((192, 128), Kernels.HOPPER, True, "HOPPER_ORDERED"),
        ((80, 80), Kernels.HOPPER, False, "HOPPER_FUSED"),
        ((264, 64), Kernels.HOPPER, False, "PLAIN"),
    ],
    ids=str,
)
def test_kernels_that_have_none_for_these_head_dims_cannot_be_forced(dims, wish, deterministic, other):
    q, v = (torch.empty(1, 8, 2, d, dtype=torch.bfloat16) for d in dims)
    table = rk.TileTable(np.array(dense.causal(8)), 8, 8)
    with pytest.raises(
        ValueError, match=rf"{wish.name} has none for head dims {dims[0]} and {dims[1]}: pass Kernels\.{other} or none"
    ):
        choose_backward(q, q, v, v, table, wish, deterministic)


@pytest.mark.parametrize("kernels", [Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED], ids=lambda kernels: kernels.name)
def test_the_fused_kernels_have_no_forward(kernels):
    q = torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"{kernels.name} has no forward"):
        choose_forward(q, q, q, 0.1, kernels)


def problem(seed: int, d: int, dtype, v_dim: int | None = None):
    """Inputs and tiles of random lengths and heads; keys and values as transposed views."""
    random = np.random.default_rng(seed)
    sq, sk = random.integers(1, 520, 2)
    tiles = dense.random_tiles(random, sq, sk)
    if seed % 3 == 0 or not tiles:
        sk = sq
        tiles = [dense.causal(sq), dense.full(sq, sq), dense.window(sq, 1 + sq // 4, 2)][seed % 9 // 3]
    b, hk, group = random.integers(1, 3), random.integers(1, 3), random.integers(1, 5)
    generator = torch.Generator("cuda").manual_seed(seed)
    v_dim = v_dim or V_DIMS.get(d, d)
    shapes = (b, sq, hk * group, d), (sk, b, hk, d), (sk, b, hk, v_dim), (b, sq, hk * group, v_dim)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in map(tuple, np.array(shapes).tolist())
    )
    return q, k.transpose(0, 1), v.transpose(0, 1), dout, tiles


def gradients(q, k, v, dout, statistics, table, kernels, start=0.0, **options):
    dq, dk, dv = (torch.full_like(x, start, dtype=torch.float32) for x in (q, k, v))
    outputs = dict(dq=dq, dk=dk, dv=dv, kernels=kernels) | options
    rk.backward(rk.Queries(q, dout, *statistics), k, v, table, softmax_scale=q.shape[3] ** -0.5, **outputs)
    return dq, dk, dv


def statistics_of(q, k, v, dout, table):
    out, row_max, row_sum = rk.forward(q, k, v, table, softmax_scale=q.shape[3] ** -0.5)
    return row_max, row_sum, rk.delta(out, dout)


def gradients_anew(q, k, v, dout, tiles, kernels):
    """dq, dk and dv, written over NaN, of a table that keeps nothing of earlier launches. Afterwards the counters are zero again."""
    table = rk.TileTable(np.array(tiles), q.shape[1], k.shape[1])
    found = gradients(q, k, v, dout, statistics_of(q, k, v, dout, table), table, kernels, start=float("nan"), add=False)
    assert not work_queue.stream_counter(q.device, torch.cuda.current_stream().cuda_stream).any()
    return found


def check_alike(found, kernels):
    """The same bits, where they are repeatable, and dq up to rounding."""
    for one in found[1:]:
        for x, y in zip(repeatable_part(one, kernels), repeatable_part(found[0], kernels)):
            assert torch.equal(x, y)
        assert (one[0] - found[0][0]).norm() <= 1e-5 * found[0][0].norm()


def repeatable_part(gradients, kernels):
    """The gradients that are the same bits from the same inputs."""
    return gradients if kernels in (Kernels.HOPPER, Kernels.HOPPER_ORDERED) else gradients[1:]


def check_against_dense(q, k, v, dout, tiles, kernels, seed):
    d, sq, sk = q.shape[3], q.shape[1], k.shape[1]
    live = dense.live_pairs(tiles, sq, sk).cuda()
    exact = dense.attention(q, k, v, dout, live, d**-0.5, torch.float64)
    same = dense.attention(q, k, v, dout, live, d**-0.5, q.dtype)
    table = rk.TileTable(np.array(tiles), sq, sk)
    statistics = statistics_of(q, k, v, dout, table)
    got = gradients(q, k, v, dout, statistics, table, kernels)
    again = gradients(q, k, v, dout, statistics, table, kernels)
    shifted = gradients(q, k, v, dout, statistics, table, kernels, start=0.5)
    for x, repeated in zip(repeatable_part(got, kernels), repeatable_part(again, kernels)):
        assert torch.equal(x, repeated), seed
    for name, x, added, rows in zip(("dq", "dk", "dv"), got, shifted, (live.any(1), live.any(0), live.any(0))):
        y, z = getattr(same, name), getattr(exact, name)
        bound = 3 * (y.double() - z).norm() + 1e-6 * exact.dv.norm()
        assert (x.double() - z).norm() <= bound, (seed, name)
        assert (added.double() - 0.5 - z).norm() <= bound, (seed, name)
        assert (x[:, ~rows] == 0).all() and (added[:, ~rows] == 0.5).all(), (seed, name)


@on_gpu
@pytest.mark.gpu
@SETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_tables_against_dense_attention(d, dtype, kernels):
    for seed in range(50):
        q, k, v, dout, tiles = problem(seed, d, dtype)
        check_against_dense(q, k, v, dout, tiles, kernels, seed)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("dims", "of"), PADDED.items(), ids=str)
def test_random_tables_of_head_dims_in_between(dims, of):
    """Nothing is written beside the columns of dq, dk and dv, which are views of wider rows of NaN."""
    for kernels, seed in itertools.product(
        (Kernels.HOPPER,) if of == (256, 256) else (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED), range(30)
    ):
        q, k, v, dout, tiles = problem(seed, dims[0], torch.bfloat16, dims[1])
        check_against_dense(q, k, v, dout, tiles, kernels, seed)
        table = rk.TileTable(np.array(tiles), q.shape[1], k.shape[1])
        statistics = statistics_of(q, k, v, dout, table)
        wide = [torch.full((*x.shape[:3], 264), float("nan"), device="cuda", dtype=x.dtype) for x in (q, k, v)]
        written = dict(zip(("dq", "dk", "dv"), (x[..., : y.shape[3]] for x, y in zip(wide, (q, k, v)))))
        arguments = written | dict(softmax_scale=dims[0] ** -0.5, add=False, kernels=kernels)
        rk.backward(rk.Queries(q, dout, *statistics), k, v, table, **arguments)
        for x, y in zip(wide, (q, k, v)):
            assert x[..., : y.shape[3]].isfinite().all() and x[..., y.shape[3] :].isnan().all()


@on_gpu
@pytest.mark.gpu
@SETS
def test_overwriting_leaves_nothing_of_what_was_there(d, kernels):
    for seed in range(10):
        q, k, v, dout, tiles = problem(seed, d, torch.bfloat16)
        table = rk.TileTable(np.array(tiles), q.shape[1], k.shape[1])
        statistics = statistics_of(q, k, v, dout, table)
        added = gradients(q, k, v, dout, statistics, table, kernels)
        written = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
        arguments = dict(zip(("dq", "dk", "dv"), written), softmax_scale=d**-0.5, add=False, kernels=kernels)
        rk.backward(rk.Queries(q, dout, *statistics), k, v, table, **arguments)
        for x, y in zip(repeatable_part(written, kernels), repeatable_part(added, kernels)):
            assert torch.equal(x, y.to(x.dtype)), seed
        # sums in another order may round to the neighbour
        torch.testing.assert_close(written[0].float(), added[0], rtol=2**-7, atol=2**-7 * added[0].std().item())


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("turns", "d"),
    [
        ([Kernels.PLAIN], 64),
        ([Kernels.PLAIN], 128),
        *(([kernels], d) for kernels in (Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED, Kernels.HOPPER) for d in (64, 128)),
        *((pair, d) for pair in ([Kernels.HOPPER_FUSED, Kernels.PLAIN], [Kernels.HOPPER, Kernels.HOPPER_FUSED]) for d in (64, 128)),
        *((turns, d) for turns in ([Kernels.HOPPER_FUSED], [Kernels.HOPPER_FUSED, Kernels.PLAIN]) for d in (96, 192)),
        *((turns, d) for turns in ([Kernels.HOPPER_ORDERED], [Kernels.HOPPER_ORDERED, Kernels.HOPPER_FUSED]) for d in (96, 192)),
        ([Kernels.HOPPER], 256),
        ([Kernels.HOPPER, Kernels.PLAIN], 256),
    ],
    ids=lambda value: "+".join(kernels.name for kernels in value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_launches_that_sum_dq_are_as_one_launch(d, dtype, turns):
    """The keys in three parts, a launch each; the kernels take turns. Each part's dk and dv are written over NaN."""
    for seed in range(12):
        q, k, v, dout, tiles = problem(seed, d, dtype)
        (_, sq, _, _), sk = q.shape, k.shape[1]
        live = dense.live_pairs(tiles, sq, sk).cuda()
        exact = dense.attention(q, k, v, dout, live, d**-0.5, torch.float64)
        same = dense.attention(q, k, v, dout, live, d**-0.5, dtype)
        statistics = statistics_of(q, k, v, dout, rk.TileTable(np.array(tiles), sq, sk))
        sums = rk.QuerySums(q, d**-0.5)
        dk, dv = (torch.full_like(x, float("nan"), dtype=torch.float32) for x in (k, v))
        for n, (begin, end) in enumerate(itertools.pairwise([0, sk // 3, sk - sk // 4, sk])):
            inside = [
                (q0, q1, max(k0, begin) - begin, min(k1, end) - begin, lo + begin, hi + begin)
                for q0, q1, k0, k1, lo, hi in tiles
                if max(k0, begin) < min(k1, end)
            ]
            inside = [tile for tile in inside if dense.live_pairs([tile], sq, end - begin).any()]
            part = slice(begin, end)
            if inside:
                table = rk.TileTable(np.array(inside), sq, end - begin)
                keys, outputs = (k[:, part], v[:, part]), dict(dq=sums, dk=dk[:, part], dv=dv[:, part])
                outputs |= dict(add=False, softmax_scale=d**-0.5, kernels=turns[n % len(turns)])
                rk.backward(rk.Queries(q, dout, *statistics), *keys, table, **outputs)
            else:
                dk[:, part] = dv[:, part] = 0
        dq = sums.finish(dtype)
        assert dq.dtype == dtype
        for name, x, rows in zip(("dq", "dk", "dv"), (dq, dk, dv), (live.any(1), live.any(0), live.any(0))):
            y, z = getattr(same, name), getattr(exact, name)
            assert (x.double() - z).norm() <= 3 * (y.double() - z).norm() + 1e-6 * exact.dv.norm(), (seed, name)
            assert (x[:, ~rows] == 0).all(), (seed, name)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((8, 128), 8),  # fewer works than multiprocessors
        ((512, 1024), 132),
        ((1024, 1024), 2 * 132),  # 280 steps for each multiprocessor
        ((32, 65536), 32 * 512),  # each has more steps than a program should
    ],
    ids=str,
)
def test_programs_share_short_works(shape, wanted, monkeypatch):
    heads, rows = shape
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 132)
    table = rk.TileTable(np.array(dense.causal(rows)), rows, rows)
    found = fused.programs_for(table, fused.CONFIGS[64], heads * rows // 128, heads, 1, torch.device("cpu"))
    assert found == wanted


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [Kernels.HOPPER_FUSED, Kernels.HOPPER_ORDERED], ids=lambda x: x.name)
@pytest.mark.parametrize("d", [64, 96, 128, 192])
def test_programs_that_share_works_do_what_one_a_work_does(d, kernels, monkeypatch):
    """Of the nine blocks of keys of a head three have no pair."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1000, 8, d), (1100, 4, d), (1100, 4, V_DIMS.get(d, d)), (1000, 8, V_DIMS.get(d, d)))
    q, k, v, dout = (torch.randn(3, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    found = []
    for together in (1, 20, 10**6):
        monkeypatch.setattr(fused, "TOGETHER", together)
        tiles = [(0, 300, 0, 300, 0, 300), (280, 990, 310, 700, -50, 400)]
        found.append(gradients_anew(q, k, v, dout, tiles, kernels))
    check_alike(found, kernels)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 96, 128])
def test_programs_that_have_heads_for_themselves_find_what_others_find(d, monkeypatch):
    """Random tables of up to 700 rows, in up to 300 heads, so that programs take several."""
    monkeypatch.setattr(fused, "UNUSED", 1)
    monkeypatch.setattr(fused, "MET", {d: math.inf})
    random, generator = np.random.default_rng(d), torch.Generator("cuda").manual_seed(d)
    for seed in range(12):
        heads = int(random.choice([1, 2, 4]))
        b, group, sq, sk = (int(random.integers(1, end)) for end in (300 // heads, 4, 700, 700))
        tiles = dense.random_tiles(random, sq, sk) or dense.full(sq, sk)
        table = rk.TileTable(np.array(tiles), sq, sk)
        dtype = (torch.bfloat16, torch.float16)[seed % 2]
        shapes = ((sq, heads * group), (sk, heads), (sk, heads), (sq, heads * group))
        q, k, v, dout = (torch.randn(b, *shape, d, generator=generator, device="cuda", dtype=dtype) for shape in shapes)
        if seed % 3 == 0:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        out, *statistics = rk.forward(q, k, v, table, softmax_scale=d**-0.5)
        found = []
        for alone in (None, (k, v, table)):
            queries = rk.ready_queries(q, out.to(dtype), dout, *statistics, once=True, alone=alone)
            assert (queries.ready[1] is None) == (alone is not None)
            sums, dk, dv = rk.QuerySums(q, d**-0.5, dtype, queries), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
            rk.backward(queries, k, v, table, softmax_scale=d**-0.5, dq=sums, dk=dk, dv=dv, add=False, splits=1)
            found.append((sums.finish(dtype), dk, dv))
        (dq, *keys), (own, *own_keys) = found
        assert all(map(torch.equal, keys, own_keys)), (seed, tiles)
        # sums in another order may round to the neighbour
        torch.testing.assert_close(
            own.float(), dq.float(), rtol=2**-7, atol=2**-7 * dq.float().std().item(), msg=str((seed, tiles))
        )


B = 1 << 20


@pytest.mark.parametrize(
    ("tiles", "heads", "paced"),
    [
        ([(0, 70000, 0, 70000, -B, B)], 4, True),
        ([(0, 70000, 0, 70000, -B, B)], 3, False),  # few works
        ([(0, 10000, 0, 20000, -B, B), (10000, 70000, 0, 300000, -B, B)], 1, True),  # two lengths, many times each
        ([(0, 10000, 0, 20000, -B, B), (10000, 70000, 0, 70000, -B, B)], 4, False),
        ([(0, 70000, 0, 70000, 0, B)], 4, False),
        ([(0, 70000, 0, 70000, -B, 0)], 8, False),
    ],
)
def test_programs_with_works_of_equal_length_wait_for_one_another(tiles, heads, paced, monkeypatch):
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 132)
    table = rk.TileTable(np.array(tiles), 70000, tiles[-1][3])
    found = fused.pace_of(table, 64, -(-table.k_rows // 128) * heads, torch.device("cpu"))
    assert found == (16 * 132 if paced else 0)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 96, 128, 192])
def test_programs_that_wait_for_one_another_do_what_others_do(d, monkeypatch):
    """A work each, and fewer of them at a time than the GPU holds, and one work at a time."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((500, 8, d), (3000, 4, d), (3000, 4, V_DIMS.get(d, d)), (500, 8, V_DIMS.get(d, d)))
    q, k, v, dout = (torch.randn(2, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    monkeypatch.setattr(fused, "TOGETHER", 1)
    found = []
    for pace in (0, 50, 1):
        monkeypatch.setattr(fused, "pace_of", lambda *arguments, pace=pace: pace)
        found.append(gradients_anew(q, k, v, dout, dense.full(500, 3000), Kernels.HOPPER_FUSED))
    check_alike(found, Kernels.HOPPER_FUSED)


@on_gpu
@pytest.mark.gpu
@SETS
def test_a_hundred_runs_give_the_same_bits(d, kernels):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((8, d), (2, d), (2, V_DIMS.get(d, d)), (8, V_DIMS.get(d, d)))
    q, k, v, dout = (torch.randn(1, 4096, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    table = rk.TileTable(np.array(dense.causal(4096)), 4096, 4096)
    statistics = statistics_of(q, k, v, dout, table)
    first = gradients(q, k, v, dout, statistics, table, kernels)
    for _ in range(100):
        again = gradients(q, k, v, dout, statistics, table, kernels)
        for x, y in zip(repeatable_part(first, kernels), repeatable_part(again, kernels)):
            assert torch.equal(x, y)
    if kernels == Kernels.HOPPER_FUSED:
        assert (again[0] - first[0]).norm() <= 1e-5 * first[0].norm()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("d", [64, 96, 128, 192])
def test_items_that_take_turns_give_the_same_bits_beside_other_work(d, mask):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((8, d), (2, d), (2, V_DIMS.get(d, d)), (8, V_DIMS.get(d, d)))
    q, k, v, dout = (torch.randn(1, 2048, *shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    tiles = dense.causal(2048) if mask == "causal" else dense.full(2048, 2048)
    table = rk.TileTable(np.array(tiles), 2048, 2048)
    statistics = statistics_of(q, k, v, dout, table)
    first = gradients(q, k, v, dout, statistics, table, Kernels.HOPPER_ORDERED)
    random, side = np.random.default_rng(0), torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(random.integers(100_000)))
            torch.mm(x, x)
        torch.cuda._sleep(int(random.integers(100_000)))
        assert all(map(torch.equal, first, gradients(q, k, v, dout, statistics, table, Kernels.HOPPER_ORDERED)))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head_dims", [[(64, 64), (128, 128)], [(96, 96), (192, 128)]], ids=str)
def test_a_thousand_launches_of_items_that_take_turns_end(head_dims, monkeypatch):
    monkeypatch.setattr(fused, "has_items_for_turns", lambda k, table: True)
    for first in range(0, 2000, 200):
        # of four seeds two are deterministic
        fuzz.launch_many(range(first, first + 200), fuzz.Scope("cuda", 600, {torch.bfloat16: head_dims}), seconds=240)
