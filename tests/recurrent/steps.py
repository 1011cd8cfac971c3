"""A recurrence step by step over a whole sequence, cases of it, and what a rank makes of a case."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import ringattn as ra

KINDS = ("none", "scalar", "vector")


@dataclass(frozen=True)
class Case:
    """A call. cuts: (start, rank) of each span, ascending, of a layout in that order; () for a named layout. documents: lengths, or None.

    decays: "none", "scalar", "vector" or "constant". beta: whether the delta rule writes; near 1, if `singular`. copies: of q's heads.
    """

    n: int
    world_size: int
    layout: str = "contiguous"
    cuts: tuple[tuple[int, int], ...] = ()
    documents: tuple[int, ...] | None = None
    decays: str = "none"
    beta: bool = False
    singular: bool = False
    copies: int = 1
    initial: bool = False
    last: bool = False
    seed: int = 0

    def make_mask(self):
        return ra.causal() if self.documents is None else ra.documents(lengths=self.documents)

    def make_layout(self):
        if not self.cuts:
            named = {
                "contiguous": ra.contiguous,
                "zigzag": ra.zigzag,
                "balanced": lambda n, w: ra.balanced(ra.documents(lengths=[n // 3, n // 4]), n, w),
                "one rank": lambda n, w: ra.Layout(n, (*((),) * (w - 1), (ra.Span(0, n),))),
                "backwards": lambda n, w: ra.Layout(n, ra.contiguous(n, w).spans[::-1]),
            }
            return named[self.layout](self.n, self.world_size)
        spans = [[] for _ in range(self.world_size)]
        for (start, rank), (stop, _) in zip(self.cuts, [*self.cuts[1:], (self.n, 0)]):
            spans[rank].append(ra.Span(start, stop - start))
        # half of the ranks hold their spans in descending order
        return ra.Layout(self.n, tuple(tuple(each[:: 1 - rank % 2 * 2]) for rank, each in enumerate(spans)))

    def inputs(self):
        """q, k, v, decay, beta and initial of the whole sequence, the gradient of out, and that of the last states on each rank."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        b, n, hk, h, d_k, d_v = 1 + self.seed % 2, self.n, 2, 2 * self.copies, 4, 3
        q, k, v = draw(b, n, hk, d_k), F.normalize(draw(b, n, hk, d_k), dim=-1), draw(b, n, h, d_v)
        shape = {"scalar": (b, n, h), "vector": (b, n, h, d_k), "constant": (h,), "none": (0,)}[self.decays]
        # from 1e-6 to 1, many near 1; every fifth is 1
        decay = -13.8 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 6
        if decay.dim() > 1:
            decay[:, ::5] = 0
        beta = torch.rand(b, n, h, generator=generator, dtype=torch.float64)
        beta = 1 - 1e-9 * beta if self.singular else beta
        documents = 1 if self.documents is None else len(self.documents)
        initial = draw(b, documents, h, d_k, d_v)
        dlast = draw(self.world_size, b, documents, h, d_k, d_v)
        if self.documents is None:
            initial, dlast = initial[:, 0], dlast[:, :, 0]
        optional = (decay if self.decays != "none" else None, beta if self.beta else None, initial if self.initial else None)
        return (q, k, v, *optional), draw(b, n, h, d_v), dlast if self.last else None

    def expected(self):
        """out, the last states (or None), and the gradients of all inputs (or None), of the whole sequence."""
        tensors, dout, dlast = self.inputs()
        leaves = [x if x is None else x.requires_grad_() for x in tensors]
        out, last = steps(*leaves, self.documents)
        loss = (out * dout).sum() + (0 if dlast is None else (last * dlast.sum(0)).sum())
        live = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad(loss, live, allow_unused=True))
        filled = [None if x is None else (next(grads), x) for x in leaves]
        filled = [None if pair is None else torch.zeros_like(pair[1]) if pair[0] is None else pair[0] for pair in filled]
        return out.detach(), last.detach() if self.last else None, filled

    def run(self, rank, group):
        """The same of this rank's shard, by `ra.linear_attention`."""
        layout = self.make_layout()
        tensors, dout, dlast = self.inputs()
        leaves = [self.cut(x, index, rank).requires_grad_() if x is not None else None for index, x in enumerate(tensors)]
        q, k, v, decay, beta, initial = leaves
        options = dict(decay=decay, beta=beta, initial_state=initial, layout=layout, mask=self.make_mask(), group=group)
        if self.last:
            out, last = ra.linear_attention(q, k, v, **options, return_final_state=True)
            loss = (last * dlast[rank]).sum()
        else:
            out, last = ra.linear_attention(q, k, v, **options), None
            loss = 0
        loss = loss + (out * ra.shard(dout, layout, rank)).sum()
        grads = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
        return out.detach(), None if last is None else last.detach(), [None if x is None else next(grads) for x in leaves]

    def cut(self, x, index, rank):
        """This rank's part of input `index`: all of constants and of initial states."""
        return x.clone() if x.dim() == 1 or index == 5 else ra.shard(x, self.make_layout(), rank)

    def difference(self, found):
        """The greatest relative difference of all ranks' results from those expected; each tensor's relative to its greatest element."""
        out, last, grads = self.expected()
        worst = 0.0
        for rank, (out_here, last_here, _) in enumerate(found):
            worst = max(worst, relative(out_here, ra.shard(out, self.make_layout(), rank), out))
            if last is not None:
                worst = max(worst, relative(last_here, last, last))
        for index, wanted in enumerate(grads):
            if wanted is None:
                continue
            parts = [of_rank[index] for _, _, of_rank in found]
            if wanted.dim() == 1 or index == 5:
                worst = max(worst, relative(sum(parts), wanted, wanted))
            else:
                shards = [ra.shard(wanted, self.make_layout(), rank) for rank in range(self.world_size)]
                worst = max([worst, *(relative(part, shard, wanted) for part, shard in zip(parts, shards))])
        return worst


def steps(q, k, v, decay, beta, initial, documents=None):
    """out (b, n, h, d_v), and the last states, token by token."""
    (b, n, hk, d_k), (*_, h, d_v) = q.shape, v.shape
    q, k = (x.repeat_interleave(h // hk, dim=2) for x in (q * d_k**-0.5, k))
    lengths = (n,) if documents is None else documents
    out, last, token = [], [], 0
    for document, length in enumerate(lengths):
        state = q.new_zeros(b, h, d_k, d_v)
        if initial is not None:
            state = initial if documents is None else initial[:, document]
        for t in range(token, token + length):
            if decay is not None:
                factor = (decay if decay.dim() == 1 else decay[:, t]).exp()
                state = (factor[..., None] if decay.dim() == 4 else factor[..., None, None]) * state
            write = v[:, t]
            if beta is not None:
                write = beta[:, t, :, None] * (write - (k[:, t, :, :, None] * state).sum(2))
            state = state + k[:, t, :, :, None] * write[:, :, None]
            out.append((q[:, t, :, :, None] * state).sum(2))
        token += length
        last.append(state)
    out += [torch.zeros_like(v[:, 0])] * (n - token)
    whole = torch.stack(out, dim=1) if out else torch.zeros_like(v)
    return whole, last[0] if documents is None else torch.stack(last, dim=1)


def relative(found, wanted, scale):
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    if not found.numel():
        return 0.0
    return ((found - wanted).abs().max() / scale.abs().max().clamp(min=1e-300)).item()


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
