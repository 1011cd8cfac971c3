"""`ra.linear_attention` over gloo against a recurrence step by step, in fp64: outputs, last states and all gradients, on every rank."""

import pytest
from hypothesis import given, settings

from tests.recurrent.steps import KINDS, Case, cases


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


def test_segments_of_several_chunks(gloo):
    kinds = [(decays, beta) for decays in KINDS for beta in (False, True)]
    check(gloo, *(Case(211, 2, decays=decays, beta=beta, initial=True, last=True) for decays, beta in kinds))


@settings(max_examples=40)
@given(case=cases())
def test_any_spans_and_documents(gloo, case):
    check(gloo, case)
