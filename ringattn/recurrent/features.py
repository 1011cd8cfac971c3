"""FAVOR+: random features by which `linear_attention` approximates softmax attention.

Source: "Rethinking Attention with Performers" (Choromanski et al. 2021): positive features (lemma 1), orthogonal blocks (section 3.2).

For rows w of a normal distribution, exp(q k) is the mean of exp(w q - |q|^2 / 2) exp(w k - |k|^2 / 2): a product of features of q and of k.

Shapes: b batch, s tokens, h heads, d head_dim, m features.
"""

from __future__ import annotations

import torch

from .. import check
from ..runtime.op import without_autocast


def favor_projection(head_dim: int, features: int, *, seed: int = 0) -> torch.Tensor:
    """The random directions of `favor_features`, (features, head_dim) fp32 on the CPU: equal on all ranks for equal seeds.

    head_dim and features may be 1 to 512.

    Each block of head_dim rows is orthogonal, with the lengths of independent normal vectors, which makes the approximation's variance
    smaller than that of independent rows. The global random number generators are neither used nor changed. Draw anew with another
    seed, the same on all ranks, to average over directions while a model trains.

    >>> import ringattn as ra
    >>> ra.favor_projection(64, 256, seed=1).shape
    torch.Size([256, 64])
    """
    head_dim = check.integer("head_dim", head_dim, least=1, most=check.MAX_HEAD_DIM)
    features = check.integer("features", features, least=1, most=check.MAX_HEAD_DIM)  # they are the recurrence's head_dim
    draw = torch.Generator().manual_seed(check.integer("seed", seed, most=2**63 - 1))
    blocks = []
    for _ in range(-(-features // head_dim)):
        # in fp64: what processors round differently is gone in fp32
        basis, triangle = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=draw, dtype=torch.float64))
        blocks.append((basis * triangle.diagonal().sign()).T)  # with these signs it is uniformly distributed
    lengths = torch.randn(features, head_dim, generator=draw, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks)[:features] * lengths).float()


def favor_features(
    x: torch.Tensor, projection: torch.Tensor, *, is_query: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Positive features of queries or keys, whose products approximate exp(scale q k) as their number grows. Differentiable.

    `linear_attention` of them with `scale=1.0`, divided by that of ones in the place of v, approximates softmax attention:

        projection = ra.favor_projection(d, 256)
        q, k = ra.favor_features(q, projection, is_query=True), ra.favor_features(k, projection)
        ones = torch.nn.functional.pad(v.new_ones(*v.shape[:3], 1), (0, 15))  # 16 columns, because fla's kernels need multiples of 16
        out = ra.linear_attention(q, k, torch.cat([v, ones], dim=3), scale=1.0, layout=layout, mask=mask)
        out = out[..., :d_v] / out[..., d_v : d_v + 1]

    For independent rows the mean square of a product's relative error is (exp(|q + k|^2) - 1) / m (lemma 2; q and k times the square root
    of scale): short vectors need few features.

    A feature is exp(w x - |x|^2 / 2) / sqrt(m), where x is multiplied by the square root of scale. Exponentials need a stabiliser, a
    number that is subtracted from the exponent and cancels in the division. For queries it is each row's maximum, which is of
    this row alone. For keys it would have to be one number for all keys of the sequence: a maximum over a shard's keys would
    weigh the keys of each rank differently, and one over all ranks would need an exchange, and let later tokens round earlier ones. So
    keys have none. They do not need it: |k|^2 is about the square root of d once k is scaled, and w k varies by as much. Longer keys,
    of |k|^2 above 100, need a norm before (QK norm): their features fall out of fp32's range.

    Args:
        x: queries or keys (b, s, h, d), bf16, fp32 or fp64. Any rows: each by itself, so a rank passes its shard. fp16 ends at 65504,
            and is refused.
        projection: (m, d), of `favor_projection`; it is moved to x's device. m is d_k of the recurrence: up to 512, for fla up to 256.
        is_query: whether to subtract each row's maximum, which only queries may.
        scale: of scores, at least 0, as for `ring_attention`: 1/sqrt(d) by default.

    Returns (b, s, h, m) in x's dtype, computed in fp32 or wider. Raises ValueError for bad input.

    >>> import torch, ringattn as ra
    >>> ra.favor_features(torch.randn(1, 8, 2, 64), ra.favor_projection(64, 256)).shape
    torch.Size([1, 8, 2, 256])
    """
    check.dense_tensor("x", x)
    check.dense_tensor("projection", projection)
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x has dtype {x.dtype}, but must be bfloat16, float32 or float64, whose range holds exponentials")
    if x.dim() != 4 or not x.shape[3]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, but must be (batch, tokens, heads, head_dim), with a head_dim of at least 1"
        )
    if projection.dim() != 2 or not len(projection) or projection.shape[1] != x.shape[3] or not projection.is_floating_point():
        raise ValueError(
            f"projection has shape {tuple(projection.shape)} and dtype {projection.dtype}, but must be (features, {x.shape[3]}), x's "
            "head_dim, of floating-point numbers: make it with favor_projection"
        )
    check.flag("is_query", is_query)
    factor = x.shape[3] ** -0.5 if scale is None else check.number("scale", scale, least=0, advice=" or None")
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * factor**0.5
    with without_autocast(x.device.type):
        exponents = wide @ projection.to(wide).T - wide.square().sum(3, keepdim=True) / 2
    if is_query:
        exponents = exponents - exponents.detach().amax(3, keepdim=True)
    return (exponents.exp() * len(projection) ** -0.5).to(x.dtype)
