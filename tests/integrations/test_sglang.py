"""SGLang's registry of attention backends, with one made of `ra.attend`, `ra.merge` and `ra.finish`: tokens of SGLang's own on CPUs.

They ran with sglang 0.5.23 and torch 2.13, though SGLang asks for 2.14.1; it is not in the development environment: without it these
tests are skipped.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from tests.integrations.server_programs import ROOT, answers, compare, installed

pytestmark = pytest.mark.thorough
if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs sglang, which is imported in processes of its own", allow_module_level=True)

PROGRAM = ROOT / "tests" / "sglang_on_cpus.py"


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """`serve(backend)`: what SGLang's engine answers, and how often ringattn's backend ran; see `sglang_on_cpus`."""
    folder = tmp_path_factory.mktemp("sglang")
    program = installed(PROGRAM, folder, "sglang.srt.plugins")

    def run(backend):
        found, printed = answers(program, folder / "llama", backend)
        return found, printed.count("ringattn's backend")

    return run


def test_answers_are_those_of_sglang(serve):
    found, calls = serve("ringattn")
    wanted, none = serve("torch_native")
    assert calls >= 24 and none == 0, "two layers, a prompt and 11 more tokens"
    compare(found, wanted)


def merged(group):
    """The difference of SGLang's combination of the ranks' outputs and lse from `merge` of the same partials: this rank's heads."""
    spec = importlib.util.spec_from_file_location("sglang_on_cpus", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.stand_in()
    from sglang.srt.layers.dcp.comm import cp_lse_ag_out_rs_mha

    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 4, 8, generator=generator) for n in (4, 40, 40))
    positions, rank = torch.tensor([0, 20, 39, 50]), group.rank()
    parts = [ra.attend(3 * q, k[:, own], v[:, own], q_positions=positions, k_positions=own) for own in torch.arange(40).split(20)]
    total = ra.merge(*parts)
    gather = [torch.empty(4, 4) for _ in parts]

    def all_gather(x, dim):
        dist.all_gather(gather, x, group=group)
        return torch.cat(gather, dim)

    def all_reduce(x):
        dist.all_reduce(x, group=group)
        return x

    theirs = SimpleNamespace(world_size=2, rank_in_group=rank, all_gather=all_gather, all_reduce=all_reduce)
    out, lse = cp_lse_ag_out_rs_mha(parts[rank].out[0].clone(), parts[rank].lse[0].T, theirs, return_lse=True)
    own = slice(2 * rank, 2 * rank + 2)
    return float((out - total.out[0, :, own]).abs().max()), float((lse - total.lse[0].T[:, own]).abs().max())


def test_merges_are_those_of_sglang(gloo):
    for found in gloo.run(2, merged):
        assert max(found) < 1e-6, found
