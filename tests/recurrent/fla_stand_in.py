"""fla's functions, by the recurrence step by step in any dtype; and what tests of its real kernels need."""

import contextlib
import importlib
from unittest import mock

import torch

from ringattn.recurrent import kernels
from tests.recurrent.steps import steps


@contextlib.contextmanager
def use_stand_in():
    """Within the block every call is computed by `FlaKernels`, which run the stand-in."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernels, "_function", return_value=chunk))
        stack.enter_context(mock.patch.object(kernels.FlaKernels, "refusal", return_value=None))
        chosen = kernels.FlaKernels()
        stack.enter_context(mock.patch("ringattn.recurrent.linear_attention.choose_kernels", return_value=chosen))
        yield


def chunk(q, k, v, g=None, beta=None, *, scale, initial_state, output_final_state, cu_seqlens):
    """(b, s, h, d) as fla takes them: queries and keys have fewer heads in delta rules alone, and -inf is NaN."""
    assert output_final_state
    assert beta is not None or q.shape[2] == v.shape[2]
    assert g is None or g.isfinite().all()
    assert cu_seqlens is None or len(v) == 1
    q = q * (scale * q.shape[3] ** 0.5)
    if cu_seqlens is None:
        return steps(q, k, v, g, beta, initial_state)
    out, last = steps(q, k, v, g, beta, initial_state[None], cu_seqlens.diff().tolist())
    return out, last[0]


def take_one_configuration():
    """Import fla's kernels with the first of each one's configurations: Triton's autotuner compiles each kernel up to 18 times else."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_one(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.configs = self.configs[:1]

    with mock.patch.object(Autotuner, "__init__", make_one):
        for module, _ in kernels._FUNCTIONS.values():
            importlib.import_module(module)


def errors(found, wanted):
    """Root mean squares of differences, relative to those of what was wanted."""
    return [((x.double() - y).norm() / y.norm().clamp(min=1e-300)).item() for x, y in zip(found, wanted, strict=True)]


def random_inputs(n, decays, beta, device, d_k=64, d_v=64, h=4, hk=2):
    """q, k, v, decay, beta, initial state and the gradient of out, in fp32, which half precision keeps apart."""
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, n, heads, d, generator=draw, device=device) for heads, d in ((hk, d_k), (hk, d_k), (h, d_v), (h, d_v))
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    shape = {"none": None, "scalar": (1, n, h), "vector": (1, n, h, d_k)}[decays]
    decay = None if shape is None else -0.2 * torch.rand(shape, generator=draw, device=device)
    if decay is not None:
        decay[:, n // 5] = -torch.inf  # forgets all
    writes = torch.rand(1, n, h, generator=draw, device=device) if beta else None
    return q, k, v, decay, writes, torch.randn(1, 2, h, d_k, d_v, generator=draw, device=device), dout
