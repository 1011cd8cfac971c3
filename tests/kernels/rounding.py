"""What rounding costs attention whose products are summed in fp32: the size of each result's error, to first order, from fp64.

Dense attention in 16 bits loses more than this, except where it happens to be exact: where a row's weights are 0 and 1, its dq is 0.

    S      u (1 + |softmax_scale| |q| . |k|)        a score, whose terms may cancel, and its exponential
    P      P (error of S - the mean of those by P)  a weight
    dP     u |dout| . |v|                           as a score
    delta  sum of P (dP - delta) (error of S)       for a whole row; and out is rounded to the inputs' dtype before it meets dout
    dS     (error of P) (dP - delta) + P (error of dP - error of delta)

with u the unit roundoff of fp32. Errors that are summed are independent: their squares add up. Shapes as in `dense`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Errors:
    """The error of each element of row_max and row_sum, (b, h, sq), and the norms of the errors of the others."""

    row_max: torch.Tensor
    row_sum: torch.Tensor
    out: float
    dq: float
    dk: float
    dv: float


def errors(q, k, v, dout, live, softmax_scale: float) -> Errors:
    """Memory grows with sq * sk."""
    # the mean of what rounding to nearest loses is about half of the most that it can lose
    u, rounded = torch.finfo(torch.float32).eps / 2, torch.finfo(q.dtype).eps / 4
    group = q.shape[2] // k.shape[2]
    # [b, h, rows, dim]
    q, dout = (x.double().transpose(1, 2) for x in (q, dout))
    k, v = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    # [b, h, sq, sk]
    scores = (q @ k.mT * softmax_scale).masked_fill(~live, float("-inf"))
    of_scores = (u * (1 + abs(softmax_scale) * (q.abs() @ k.abs().mT))).masked_fill(~live, 0.0)
    # [b, h, sq, 1]
    row_max, of_max = scores.amax(-1, keepdim=True), of_scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - row_max.masked_fill(row_max == float("-inf"), 0.0))
    p = weights / weights.sum(-1, keepdim=True).clamp_min(1.0)
    out, dp = p @ v, dout @ v.mT
    centred = dp - (out * dout).sum(-1, keepdim=True)
    # squares, all of these
    of_logits = (p * of_scores) ** 2
    of_p = of_logits + p**2 * of_logits.sum(-1, keepdim=True)
    of_dp = (u * (dout.abs() @ v.abs().mT)) ** 2
    of_delta = (of_logits * centred**2).sum(-1, keepdim=True) + (rounded * out * dout).square().sum(-1, keepdim=True)
    of_ds = of_p * centred**2 + p**2 * of_dp
    qq, kk, vv, out2, dout2, mean2 = (x.square().sum(-1, keepdim=True) for x in (q, k, v, out, dout, p @ k))
    return Errors(
        row_max=of_max[..., 0],
        row_sum=(weights * (of_scores + of_max)).sum(-1),
        out=float((of_logits * (vv.mT + out2)).sum().sqrt()),
        dq=abs(softmax_scale) * float(((of_ds * kk.mT).sum() + (of_delta * mean2).sum()).sqrt()),
        dk=abs(softmax_scale) * float(((of_ds + p**2 * of_delta) * qq).sum().sqrt()),
        dv=float((of_p * dout2).sum().sqrt()),
    )
