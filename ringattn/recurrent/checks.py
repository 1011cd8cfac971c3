"""Checks of the tensors of `linear_attention` and `causal_conv1d`, and of states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import check
from ..geometry.mask import Documents, Mask
from .local import RecurrenceInputs

_FLOATS = "bfloat16, float16, float32 or (on CPU) float64"


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, beta: torch.Tensor | None) -> None:
    """Raise ValueError unless the tensors, which attention could take, fit together as those of a recurrence."""
    check.no_transforms(q=q, k=k, v=v)
    for name, x in (("k", k), ("v", v)):
        _same(name, x, q)
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q has {q.dtype}: cast all three to one dtype")
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(f"{name} has shape {tuple(x.shape)} and q has {tuple(q.shape)}: batch and tokens must be equal")
    if k.shape[2:] != q.shape[2:]:
        raise ValueError(f"k has shape {tuple(k.shape)} and q has {tuple(q.shape)}: heads and head_dim must be equal")
    hk, h = k.shape[2], v.shape[2]
    if hk == 0 or h == 0 or h % hk:
        raise ValueError(f"q and k have {hk} heads and v has {h}: each of theirs serves as many of v's, so h % hk must be 0")
    b, s, d_k = v.shape[0], v.shape[1], k.shape[3]
    if decay is not None:
        _floats("decay", decay, q)
        if tuple(decay.shape) not in ((b, s, h), (b, s, h, d_k), (h,)):
            raise ValueError(
                f"decay has shape {tuple(decay.shape)}, but must have {(b, s, h)}, a number a head, or {(b, s, h, d_k)}, a vector, or "
                f"{(h,)}, constants: one for each of v's heads"
            )
        # GPUs would have to be waited for
        if decay.device.type == "cpu" and check.has_values(decay) and not bool((decay.detach() <= 0).all()):
            found = decay.detach().max().item()
            raise ValueError(
                f"decay holds {found:.6g}, but is a natural logarithm of at most 0: pass log(a) for a factor a of 0 to 1"
            )
    if beta is not None:
        _floats("beta", beta, q)
        if tuple(beta.shape) != (b, s, h):
            raise ValueError(f"beta has shape {tuple(beta.shape)}, but must have {(b, s, h)}: a number for each of v's heads")


def check_states(initial: torch.Tensor, q: torch.Tensor, v: torch.Tensor, mask: Mask) -> None:
    """Raise ValueError unless initial states fit the call."""
    _floats("initial_state", initial, q)
    b, h, d_k, d_v = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    of_documents = isinstance(mask, Documents)
    wanted = (b, len(mask.cu_seqlens) - 1, h, d_k, d_v) if isinstance(mask, Documents) else (b, h, d_k, d_v)
    if tuple(initial.shape) != wanted:
        each = ", one for each document" if of_documents else ""
        raise ValueError(f"initial_state has shape {tuple(initial.shape)}, but must have {wanted}{each}")


def check_channels(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless x (b, s, c), weight (c, width) and bias (c,) fit together."""
    check.dense_tensor("x", x)
    _floats("x", x, x)
    if x.dim() != 3:
        raise ValueError(f"x has {x.dim()} dimensions, shape {tuple(x.shape)}, but must have 3: (batch, tokens, channels)")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"x is on {x.device}, but ringattn computes on cpu and cuda devices")
    _floats("weight", weight, x, "x")
    c = x.shape[2]
    if weight.dim() != 2 or weight.shape[0] != c or weight.shape[1] == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, but must have (channels, width) with {c} channels: pass conv.weight.squeeze(1) of "
            "an nn.Conv1d with groups=channels"
        )
    if bias is not None:
        _floats("bias", bias, x, "x")
        if tuple(bias.shape) != (c,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but must have {(c,)}, a number a channel")


def overflow(inputs: RecurrenceInputs, numbers: Iterable[torch.Tensor], at: int) -> ValueError | None:
    """An error, if numbers that follow from this rank's input are not finite although the input is; `at` is a position."""
    if all(bool(x.isfinite().all()) for x in numbers):
        return None
    tensors = inputs.k, inputs.v, inputs.beta, inputs.initial
    if not all(x is None or bool(x.isfinite().all()) for x in tensors):
        return None
    return ValueError(
        f"the state of the recurrence overflows {inputs.dtype} by position {at}, although all input is finite: normalise k, or pass "
        "smaller values"
    )


def _same(name: str, x: torch.Tensor, first: torch.Tensor, of: str = "q") -> None:
    if x.device != first.device:
        raise ValueError(f"{name} is on {x.device} and {of} is on {first.device}: move all to one device")


def _floats(name: str, x: torch.Tensor, first: torch.Tensor, of: str = "q") -> None:
    """Refuse anything but a plain tensor of floating-point numbers beside the call's first tensor, which is called `of`."""
    check.dense_tensor(name, x)
    check.no_transforms(**{name: x})
    if x.dtype not in check.DTYPES:
        raise ValueError(f"{name} has dtype {x.dtype}, but must be {_FLOATS}")
    _same(name, x, first, of)
