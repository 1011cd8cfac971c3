"""Kernels compile for every architecture without a GPU and fit its shared memory; those that must not spill do not.

A variant not compiled here differs from one that is only in its dtype or its flags; `python -m ringattn_kernels.variants`
compiles them all.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
import triton

from ringattn_kernels import attention, dispatch, splits
from ringattn_kernels.config import SMALL, architecture, launch_for
from ringattn_kernels.modifiers import Bias, Dropout, Modifiers
from ringattn_kernels.paged import paged_config
from ringattn_kernels.table import TileTable
from ringattn_kernels.variants import (
    ARCHITECTURES,
    FORWARD,
    KERNELS,
    MODIFIED,
    SHARED_LIMIT,
    Variant,
    all_variants,
    compile_variant,
    launch_arguments,
    source,
    target,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
APART = ("dk", "dv", "dk modified", "dv modified")  # over 256
HALVES = ("forward to state", "forward from state")  # each of their two flags is that of another form: of neither state, or of both


def chosen(arch: str, thorough: bool) -> list[Variant]:
    """On every architecture large kernels in a large head dim; more on sm_90, or if thorough. Those of 256 take longest.

    At 512, dk and dv are apart but for gfx942.
    """
    most = 256 if thorough or arch == "sm_90" else 128
    forms = [("forward", most, BF16), ("dkdv", most, BF16)]
    if thorough or arch in ("sm_90", "gfx942"):
        forms += [("dq", most, BF16), ("paged", 256, BF16)]
    if thorough or arch == "sm_90":
        forms += [("forward from state to state", 128, BF16)]
    if arch == "gfx942":
        forms += [("forward", 64, FP32)]
    if thorough and arch == "gfx942":
        forms += [("merge", 128, BF16)]
    if thorough or arch == "sm_90":
        left_out = APART if thorough else (*APART, *HALVES, "dkdv", "dq")
        forms += [(kernel, 128, BF16) for kernel in KERNELS if kernel not in left_out]
    if thorough:
        forms += [(kernel, 64, BF16) for kernel in ("forward", "dkdv", "dq", "paged")]
    if arch == "sm_90":
        forms += [("forward", 64, FP32), ("dq", 64, FP32)]
    if thorough and arch == "sm_90":
        forms += [("forward", 128, FP16)]
    if thorough:
        forms += [(kernel, 512, BF16) for kernel in ("forward", "dq", "paged", *(("dkdv",) if arch == "gfx942" else ("dk", "dv")))]
    if thorough and arch == "sm_90":
        forms += [
            (kernel, 512, BF16)
            for kernel in (*FORWARD, "merge", "merge from state", "sum", "delta", "forward modified", "dq modified")
        ]
        forms += [(kernel, 512, BF16) for kernel in APART[2:]]
        forms += [(kernel, 512, FP32) for kernel in ("forward", "dk", "dv", "dq", "paged")]
        forms += [(kernel, 64, BF16) for kernel in KERNELS if "state" in kernel]
    return [Variant(*form, arch) for form in dict.fromkeys(forms)]


# within 99 KB
OF_SMALL = [Variant("dq", 512, BF16, "sm_86"), Variant("paged", 256, BF16, "sm_120")]
MORE_OF_SMALL = [
    *(Variant(kernel, 256, dtype, "sm_86") for kernel in ("forward", "dkdv", "dq", "paged") for dtype in (BF16, FP32)),
    *(
        Variant(kernel, 512, BF16, arch)
        for kernel in ("forward", "dk", "dq", "dq modified", "paged")
        for arch in ("sm_86", "sm_120")
    ),
    *(Variant(kernel, 128, BF16, "sm_120") for kernel in ("forward", "dkdv", "dq", "paged")),
    Variant("dkdv", 256, BF16, "sm_120"),
]
CHOSEN, MORE = ([variant for arch in ARCHITECTURES for variant in chosen(arch, thorough)] for thorough in (False, True))


@pytest.fixture(scope="module")
def compiled(request):
    """Compiles a variant: all of them on all cores, or each in its turn where the other cores have tests of their own."""
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing"
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield compile_variant
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        variants = {
            item.callspec.params["variant"]
            for item in request.session.items
            if hasattr(item, "callspec") and item.path == request.path and "variant" in item.callspec.params
        }
        futures = {variant: pool.submit(compile_variant, variant) for variant in variants}
        yield lambda variant: futures[variant].result()


@pytest.mark.parametrize(
    "variant",
    [
        *(*CHOSEN, *OF_SMALL),
        *(
            pytest.param(variant, marks=pytest.mark.thorough)
            for variant in (*MORE, *MORE_OF_SMALL)
            if variant not in CHOSEN and variant not in OF_SMALL
        ),
    ],
    ids=lambda v: f"{v.arch}-{v.kernel}-{v.head_dim}-{v.dtype}".replace(" ", "_"),
)
def test_compiles_within_the_limits_of_the_architecture(variant, compiled):
    resources = compiled(variant)
    assert resources.registers > 0
    assert resources.shared <= SHARED_LIMIT[variant.arch]
    if variant.arch == "sm_90" and variant.kernel in FORWARD and variant.head_dim <= 128 and variant.dtype != FP32:
        assert resources.stack == resources.spills == 0
    if variant.arch == "sm_80" and variant.head_dim == 512:
        assert resources.stack == resources.spills == 0
    if variant.arch == "sm_90" and variant.kernel.startswith("paged") and variant.dtype != FP32:
        # all of a multiprocessor's programs at once
        config = paged_config("sm_90", variant.head_dim, variant.dtype)
        assert config.programs * 32 * config.num_warps * resources.registers <= 1 << 16
        assert config.programs * (resources.shared + 1024) <= 228 << 10
        assert resources.stack == resources.spills == 0
    if variant.kernel.startswith(("merge", "sum")):
        assert resources.stack == resources.spills == 0


@pytest.mark.parametrize("kernel", [MODIFIED[0], *(pytest.param(kernel, marks=pytest.mark.thorough) for kernel in MODIFIED[1:])])
def test_each_part_of_a_score_compiles_alone(kernel):
    """A part that is not there is no argument of the kernel."""
    for modifiers in (
        Modifiers(softcap=30.0),
        Modifiers(slopes=torch.empty(2, 16)),
        Modifiers(bias=Bias((-9, 9), torch.empty(16, 3))),
        Modifiers(dropout=Dropout(0.1, 1, 0, 16)),
    ):
        assert compile_variant(Variant(kernel, 64, BF16, "sm_90"), modifiers=modifiers).registers > 0


def test_the_chosen_variants_are_some_of_all():
    assert set(CHOSEN) < set(MORE) < set(all_variants())
    assert {variant.kernel for variant in CHOSEN} == set(KERNELS) - set(APART) - set(HALVES)
    assert {variant.kernel for variant in MORE} == set(KERNELS)


def test_keys_of_pages_are_loaded_ahead():
    """Two steps' keys and values are under way while a third is computed: buffers of three steps fill the shared memory."""
    found = compile_variant(Variant("paged", 128, BF16, "sm_90"))
    assert found.shared >= 3 * 2 * 64 * 128 * 2


@pytest.mark.parametrize("kernel", ["merge pages", pytest.param("paged", marks=pytest.mark.thorough)])
def test_kernels_for_pages_wait_for_the_kernel_before(kernel):
    """All that they write, and the partials that they read, come after the wait; the split kernel reads nothing before it."""
    function, arguments = launch_arguments(Variant(kernel, 128, BF16, "sm_90"))
    assert arguments["launch_pdl"]
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    ptx = triton.compile(source(function, arguments), target=target("sm_90"), options=options).asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert "st.global" not in before and "st.global" in after
    # the merge reads lengths and first pages, past the caches of a multiprocessor
    assert before.count("ld.global") == before.count("ld.global.cg") == (2 if kernel == "merge pages" else 0)
    function, arguments = launch_arguments(Variant(kernel, 128, BF16, "sm_80"))
    assert "launch_pdl" not in arguments and not arguments["AHEAD"]


@pytest.mark.parametrize(
    ("named", "found"), [("sm80", "sm_80"), ("sm86", "sm_86"), ("sm90a", "sm_90"), ("sm120", "sm_120"), ("gfx90a", "gfx90a")]
)
def test_a_gpu_is_taken_for_the_architecture_that_triton_compiles_for(monkeypatch, named, found):
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", named)
    assert architecture(torch.device("cuda")) == found


def test_the_forward_of_an_a100_takes_other_blocks_with_dropout():
    for d, same in ((64, True), (96, False), (128, False), (256, True)):
        assert (launch_for("forward", "sm_80", d, BF16) == launch_for("forward", "sm_80", d, BF16, dropping=True)) == same
    assert launch_for("forward", "sm_90", 128, BF16) == launch_for("forward", "sm_90", 128, BF16, dropping=True)
    assert launch_for("dq", "sm_80", 128, BF16) == launch_for("dq", "sm_80", 128, BF16, dropping=True)


def test_dropout_is_told_to_the_choice_of_blocks(monkeypatch):
    for module in (attention, dispatch):
        monkeypatch.setattr(module, "architecture", lambda device: "sm_80")
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 108)
    q = torch.empty(1, 256, 2, 128, dtype=BF16)
    table = TileTable(np.array([(0, 256, 0, 256, 0, 256)]), 256, 256, np.zeros((1, 2)))
    for modifiers in (None, Modifiers(softcap=30.0), Modifiers(dropout=Dropout(0.1, 1, 0, 2))):
        _, config, _ = attention.forward_choice(q, q, q, table, 0.1, modifiers=modifiers)
        dropping = modifiers is not None and modifiers.dropout is not None
        assert config == launch_for("forward", "sm_80", 128, BF16, dropping)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
def test_heads_over_256_take_smaller_blocks_where_memory_is_small(arch):
    smaller = launch_for("dq", arch, 512, BF16).step < launch_for("dq", "sm_80", 512, BF16).step
    assert smaller == (arch in SMALL)
