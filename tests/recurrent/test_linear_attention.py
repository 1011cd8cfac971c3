"""`ra.linear_attention` over gloo against a recurrence step by step, in fp64: outputs, last states and all gradients, on every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringattn as ra
from tests.recurrent.steps import Case

KINDS = ("none", "scalar", "vector")


def run(group, cases):
    return [case.run(group.rank(), group) for case in cases]


def check(gloo, *cases):
    by_rank = gloo.run(cases[0].world_size, run, cases)
    for case, found in zip(cases, zip(*by_rank)):
        assert case.difference(found) < 1e-9, case


@pytest.mark.parametrize("beta", [False, True], ids=["linear", "delta"])
@pytest.mark.parametrize("decays", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_agrees_with_the_recurrence(gloo, world_size, decays, beta):
    layouts = "contiguous", "zigzag", "balanced", "one rank", "backwards"
    options = dict(world_size=world_size, decays=decays, beta=beta, copies=1 + world_size % 2)
    lengths = (1, 2, 17, 31, 97)
    cases = [
        Case(n, layout=layout, seed=seed, initial=seed % 3 == 0, last=seed % 2 == 0, **options)
        for seed, (layout, n) in enumerate(zip(layouts, lengths[world_size - 1 :] + lengths[: world_size - 1]))
    ]
    check(gloo, *cases)


@st.composite
def cases(draw):
    world_size = draw(st.sampled_from([2, 3, 5]))
    n = draw(st.integers(1, 40))
    starts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=9))) if n > 1 else []
    cuts = tuple((start, draw(st.integers(0, world_size - 1))) for start in [0, *starts])
    documents = None
    if draw(st.booleans()):
        ends = sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=5)))
        documents = tuple(end - begin for begin, end in zip([0, *ends], ends))
    beta = draw(st.booleans())
    return Case(
        n,
        world_size,
        cuts=cuts,
        documents=documents,
        decays=draw(st.sampled_from([*KINDS, "constant"])),
        beta=beta,
        singular=beta and draw(st.booleans()),
        copies=draw(st.integers(1, 2)),
        initial=draw(st.booleans()),
        last=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(case=cases())
def test_any_spans_and_documents(gloo, case):
    check(gloo, case)
