"""The kernels for pages: a configuration for each size, and on a GPU accuracy, repeatability and CUDA graphs."""

import pytest
import torch

import ringattn as ra
from ringattn_kernels.paged import merge_form, paged_config
from tests.cuda_graphs import captured
from tests.serving.twin import reference

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 192, 256, 512])
def test_there_is_a_configuration_for_each_size(arch, dtype, head_dim):
    config = paged_config(arch, head_dim, dtype)
    assert config.keys >= 16 and config.rows >= 16 and config.programs >= 1


@pytest.mark.parametrize(
    ("segments", "programs", "form"), [(8, 264, (64, 4)), (64, 264, (8, 1)), (512, 264, (2, 1)), (1, 9999, (64, 4))]
)
def test_a_merge_reads_the_partials_of_a_segment_at_a_time(segments, programs, form):
    assert merge_form(segments, programs) == form


def filled(lengths, heads, dims, page_size, dtype):
    """A cache on the GPU, its sequences' keys and values, and their batch."""
    generator = torch.Generator("cuda").manual_seed(0)
    cache = ra.PagedCache(
        pages=sum(lengths) // page_size + 64, kv_heads=heads[1], head_dim=dims[0], v_head_dim=dims[1], page_size=page_size,
        dtype=dtype, device="cuda",
    )  # fmt: skip
    sequences, kept = [cache.add() for _ in lengths], []
    for sequence, length in zip(sequences, lengths):
        pair = [torch.randn(1, length, heads[1], dim, generator=generator, device="cuda").to(dtype) for dim in dims]
        cache.append(cache.extend([sequence], length), *pair)
        kept.append([x[0] for x in pair])
    return cache, cache.extend(sequences, 0), kept, generator


@pytest.mark.parametrize("page_size", [16, 64, 256], ids="page{}".format)
@pytest.mark.parametrize("tokens", [1, 4, 16], ids="{}tokens".format)
@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((32, 8), (128, 128), torch.bfloat16),
        ((8, 8), (64, 64), torch.float16),
        ((16, 1), (128, 128), torch.bfloat16),
        ((6, 2), (96, 40), torch.bfloat16),
        ((4, 2), (256, 256), torch.bfloat16),
        ((8, 1), (512, 512), torch.bfloat16),
        ((48, 1), (192, 128), torch.bfloat16),
        ((4, 2), (64, 64), torch.float32),
    ],
    ids=str,
)
class TestOnAGpu:
    pytestmark = on_gpu

    def test_error_is_within_the_contract(self, heads, dims, dtype, tokens, page_size):
        """Against dense attention in fp64, at most twice the error of dense attention in the same dtype; and the same bits again."""
        cache, batch, kept, generator = filled((1000, 16, 65, 3001), heads, dims, page_size, dtype)
        q = torch.randn(4, tokens, heads[0], dims[0], generator=generator, device="cuda").to(dtype)
        for score in (None, ra.score(softcap=20.0, sinks=torch.linspace(-2, 2, heads[0], device="cuda"))):
            for mask in (ra.causal(), ra.sliding_window(100)):
                out = ra.decode(q, cache, batch, mask=mask, score=score)
                assert torch.equal(out, ra.decode(q, cache, batch, mask=mask, score=score))
                exact, same = (
                    torch.stack(
                        [reference(q[i].to(kind), *(x.to(kind) for x in kept[i]), mask=mask, score=score) for i in range(4)]
                    )
                    for kind in (torch.float64, dtype)
                )
                allowed = (same.double() - exact).norm()
                assert (out.double() - exact).norm() <= 2 * allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_cuda_graph_goes_on_as_sequences_grow():
    heads, dims, dtype = (32, 8), (128, 128), torch.bfloat16
    cache, batch, _, generator = filled((4000, 100, 63), heads, dims, 64, dtype)
    sequences = batch.sequences
    batch = cache.extend(sequences, 1)
    q, k, v = (torch.zeros(3, 1, h, 128, device="cuda", dtype=dtype) for h in (32, 8, 8))

    def step():
        cache.append(batch, k, v)
        return ra.decode(q, cache, batch)

    graph, out = captured(step)
    for _ in range(200):  # pages fill up, and others begin
        cache.extend(sequences, 1, into=batch)
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        graph.replay()
        assert torch.equal(out, ra.decode(q, cache, batch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("lengths", [(8192,), (4000, 100, 63), (128,) * 64], ids=str)
def test_calls_wait_for_those_before_them(lengths):
    """Each call's queries are what the call before returned: the same bits whether the host waits in between, in a stream, in a graph."""
    cache, batch, _, generator = filled(lengths, (32, 8), (128, 128), 64, torch.bfloat16)
    first = torch.randn(len(lengths), 1, 32, 128, generator=generator, device="cuda").bfloat16()

    def chain(wait: bool) -> list[torch.Tensor]:
        found = [first]
        for _ in range(20):
            # no kernel lies between two calls
            found.append(ra.decode(found[-1], cache, batch))
            if wait:
                torch.cuda.synchronize()
        return found

    exact = chain(wait=True)
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(exact, chain(wait=False), strict=True))
    graph, results = captured(lambda: chain(wait=False))
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(exact, results, strict=True))
