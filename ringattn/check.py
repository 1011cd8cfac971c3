"""Checks of what a user passes, before any communication: each error names the argument, what came and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor, is_gradtrackingtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .digest import constant

MAX_HEAD_DIM = 512
MAX_POSITION = 1 << 48  # sums of a few positions then fit an int64
MAX_TOKENS = 3_000_000_000  # of a layout: its square, the number of its pairs, fits an int64
MAX_RANKS = 1 << 16  # layouts and plans hold a table of all ranks
MANY_HEADS = 128  # of keys: models have no more
PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes without behaviour of their own
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TRANSFORMED = "in forward mode or by torch.func, which attention does not support: call backward, or torch.autograd.grad"
SWAPPED = "if they are (batch, heads, tokens, head_dim), as torch has them, pass x.transpose(1, 2)"
# advice for `instance`
BUILD_A_LAYOUT = "build one with zigzag(seq_len, world_size) and the like"
BUILD_A_MASK = "build one with causal(), documents(...) and the like"
BUILD_A_SCORE = "build one with score(softcap=...) and the like"
BUILD_A_SCHEDULE = "build one with ring(), waves(width) and the like"


def shown(value: Any) -> str:
    """`value` in an error: a tensor by its shape."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


# what takes the place of arguments that other attention functions have
_ELSEWHERE = {
    "dropout_p": "score=score(dropout=...)",
    "dropout": "score=score(dropout=...)",
    "attn_mask": "mask=, over global positions, for what is live, and score=score(bias=..., alibi=...) for what is added to scores",
    "attention_mask": "mask=, over global positions",
    "key_padding_mask": "mask=documents(...) over packed sequences; padding on the right needs nothing: causal queries never see it",
    "block_mask": "mask=, such as block_sparse(blocks, block_size), documents(...) or sliding_window(...), over global positions",
    "mask_mod": "mask=, such as causal(), documents(...) or sliding_window(...), over global positions",
    "attn_bias": "score=score(bias=relative_bias(...)) or score(alibi=...), which depend on distances",
    "bias": "score=score(bias=relative_bias(...)) or score(alibi=...), which depend on distances",
    "score_mod": "score=score(softcap=..., alibi=..., bias=..., sinks=..., dropout=...), each of which changes scores",
    "softcap": "score=score(softcap=...)",
    "alibi_slopes": "score=score(alibi=...)",
    "sinks": "score=score(sinks=...)",
    "s_aux": "score=score(sinks=...)",
    "causal": "mask=causal(), the default, or mask=full()",
    "is_causal": "mask=causal(), the default, or mask=full()",
    "window_size": "mask=sliding_window(left, right)",
    "cu_seqlens": "mask=documents(cu_seqlens)",
    "scale": "softmax_scale=",
    "enable_gqa": "nothing: k and v may have fewer heads",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "return_attn_probs": "return_stats=True, for the softmax's statistics",
    "return_lse": "return_stats=True, for the softmax's statistics",
    "process_group": "group=",
}


def unknown(function: str, names: Iterable[str]) -> TypeError:
    """The error for keyword arguments that a function does not have, with what takes their place."""
    said = [f"{name!r}" + (f" (use {_ELSEWHERE[name]})" if name in _ELSEWHERE else "") for name in names]
    return TypeError(f"{function}() got an unexpected keyword argument {', '.join(said)}")


def integer(name: str, value: Any, least: int | None = 0, most: int | None = None) -> int:
    """`value`, an integer of Python or NumPy, as an int of at least `least` (None: any) and at most `most` (None: any)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} is {shown(value)}, but must be an integer")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name} is {value}, but must be at most {most}")
    return int(value)


def number(name: str, value: Any, least: float | None = None, advice: str = "") -> float:
    """`value`, a number of Python or NumPy, as a finite float of at least `least` (None: any)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"{name} is {shown(value)}, but must be a Python number{advice}")
    try:
        found = float(value)
    except OverflowError:  # an integer
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} is {found}, but must be finite")
    if least is not None and found < least:
        raise ValueError(f"{name} is {found}, but must be at least {least}")
    return found


def flag(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, but must be a bool")
    return value


def listed(name: str, values: Any, wanted: str) -> list[Any]:
    """What an iterable holds, but for text; `wanted` says in the error what it should be."""
    if not isinstance(values, (str, bytes)):
        with suppress(TypeError):  # what looks iterable may not be, such as a class or a 0-D array
            return list(values)
    raise ValueError(f"{name} is {shown(values)}, but must be {wanted}")


def function(name: str, value: Any, wanted: str) -> None:
    """Raise ValueError unless `value` can be called; `wanted` says what it should do."""
    if not callable(value):
        raise ValueError(f"{name} is {shown(value)}, but must be a function {wanted}")


def integers(name: str, values: Any) -> np.ndarray:
    """`values` as a one-dimensional int64 array."""
    array = as_array(name, values, "one-dimensional")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, but must be one-dimensional")
    if array.size and array.dtype != np.int64:
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} has dtype {array.dtype}, but must hold integers")
        if array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{name} holds {array.max()}, but must hold integers below 2**63")
    return array.astype(np.int64)


def as_array(name: str, values: Any, wanted: str) -> np.ndarray:
    """`values` as an array; `wanted` describes the shape in the error for ragged values."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # ragged; or tensors without values that NumPy can hold: meta, sparse, bfloat16
        what = f"a tensor of {values.dtype} on {values.device}" if isinstance(values, torch.Tensor) else repr(values)
        raise ValueError(f"{name} is {what}, but must be {wanted}") from None


def window(name: str, value: Any) -> tuple[Any, Any]:
    """`(left, right)` from a pair, or from one value for both sides."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} is {value!r}, but must be one integer or the pair (left, right)")
    return value


def dim(name: str, x: torch.Tensor, value: Any) -> int:
    """`value` as a dimension of x, counted from 0."""
    number = integer("dim", value, least=None)
    if not -x.dim() <= number < x.dim():
        raise ValueError(f"dim is {number}, but {name} has {x.dim()} dimensions")
    return number % x.dim()


def instance(name: str, value: Any, kind: type, advice: str) -> None:
    """Raise ValueError, with `advice`, unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}, but must be a {kind.__name__}: {advice}")


def optional(name: str, value: Any, kind: type, advice: str) -> None:
    """As `instance`, but None is fine."""
    if value is not None:
        instance(name, value, kind, advice)


def softmax_scale(value: Any, head_dim: int) -> float:
    """The scale as a finite float; 1/sqrt(head_dim) for None."""
    if value is None:
        return head_dim**-0.5
    return number("softmax_scale", value, advice=" or None: pass scale.item() for a tensor")


def qkv(q: Any, k: Any, v: Any) -> None:
    """Refuse types, shapes, dtypes and devices that attention cannot take: (b, s, h, d), (b, sk, hk, d), (b, sk, hk, d_v)."""
    tensors(q, k, v)
    backward_mode(q=q, k=k, v=v)
    fit(q, k, v)


def tensors(q: Any, k: Any, v: Any) -> None:
    """Refuse each tensor that attention cannot take by itself: it must be plain and have four dimensions."""
    named = ("q", q), ("k", k), ("v", v)
    for name, x in named:
        _attention_tensor(name, x)
    # asked in each call: together
    if not torch.compiler.is_compiling() and (q.is_neg() or k.is_neg() or v.is_neg()):
        for name, x in named:
            _values(name, x)


def has_values(x: torch.Tensor) -> bool:
    """Whether x has numbers, and not just a shape, as meta and fake tensors have."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def captured(x: torch.Tensor) -> bool:
    """Whether operations on x are now captured in a CUDA graph instead of executed."""
    return x.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def backward_mode(**tensors: torch.Tensor) -> None:
    """Refuse tensors in forward mode or torch.func, which would treat attention as a constant; ordinary autograd is fine."""
    forward_mode = in_forward_mode()
    for name, x in tensors.items():
        tangent = forward_ad.unpack_dual(x).tangent if forward_mode else None
        if tangent is not None or is_gradtrackingtensor(x):
            raise ValueError(f"{name} is differentiated {TRANSFORMED}")


def no_transforms(**tensors: torch.Tensor) -> None:
    """Refuse tensors in forward mode or any transform of torch.func."""
    backward_mode(**tensors)
    for name, x in tensors.items():
        if is_batchedtensor(x):
            raise ValueError(f"{name} is in torch.vmap, which this does not support: call it on the whole batch")


def in_forward_mode() -> bool:
    """Whether this code runs at a level of forward-mode AD."""
    return forward_ad._current_level >= 0


@constant
def transformed() -> bool:
    """Whether torch.compile now traces code whose derivative is taken in forward mode or by torch.func; torch.vmap takes none."""
    levels = get_interpreter_stack() or []
    return in_forward_mode() or any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels)


def fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors of different dtypes, on different devices, or of shapes that do not fit together."""
    _same_kind(q, k, v)
    shapes(q, k, v)


def shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse sizes that do not fit together: (b, s, h, d), (b, sk, hk, d), (b, sk, hk, d_v) with h % hk == 0."""
    b, _, h, d = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != b:
            raise ValueError(f"{name} has batch size {x.shape[0]} and q has {b}: they must be equal")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v has {v.shape[1]} tokens and k has {k.shape[1]}: each key needs its value")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v has {v.shape[2]} heads and k has {k.shape[2]}: they must be equal")
    hk = k.shape[2]
    if h == 0 or hk == 0:
        raise ValueError(f"q has {h} heads and k has {hk}: both need at least one")
    if h % hk:
        raise ValueError(f"k has {hk} heads, which does not divide q's {h}: grouped-query attention needs h % hk == 0")
    if k.shape[3] != d:
        raise ValueError(f"k has head_dim {k.shape[3]} and q has {d}: they must be equal (only v's may differ)")


def same_tokens(q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse different numbers of tokens: where K and V have no layout of their own, a rank's Q, K and V hold the same tokens."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}: a rank's q, k and v must hold the same tokens; "
            "for other keys pass kv_layout (to reference.attention: q_offset), or use attend with q_positions and k_positions"
            + _hint(q, k)
        )


def _hint(q: torch.Tensor, k: torch.Tensor) -> str:
    """What else may be wrong, if the sizes fit another order of the dimensions."""
    heads, kv_heads = q.shape[1], k.shape[1]
    return f"; {SWAPPED}" if q.shape[2] == k.shape[2] and kv_heads and heads % kv_heads == 0 else ""


def looks_swapped(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether q and k have one number of heads, which no model has, and few tokens: the sizes of (batch, heads, tokens, head_dim)."""
    return q.shape[2] == k.shape[2] > MANY_HEADS >= q.shape[1]


def positions(name: str, value: Any, tokens: int, argument: str) -> torch.Tensor:
    """Global positions, one for each token, as a one-dimensional int64 tensor; 0, 1, 2, ... for None."""
    if value is None:
        return torch.arange(tokens)
    array = integers(name, value)
    if len(array) != tokens:
        raise ValueError(f"{name} has {len(array)} positions, but {argument} has {tokens} tokens: give one position a token")
    if len(array) and array.min() < 0:
        raise ValueError(f"{name} has the negative position {array.min()}: positions start at 0")
    if len(array) and array.max() >= MAX_POSITION:
        raise ValueError(f"{name} has the position {array.max()}, but positions must be less than 2**48")
    return torch.from_numpy(array)


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, known by its name because the import takes a second."""
    return type(x).__name__ == "DTensor"


def dense_tensor(name: str, x: Any) -> None:
    """Refuse anything but a plain tensor."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, but must be a torch.Tensor")
    if is_dtensor(x):
        raise ValueError(f"{name} is a DTensor: pass this rank's shard, {name}.to_local()")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor: pack the sequences into one dimension and pass mask=documents(lengths)")
    if x.layout != torch.strided:
        raise ValueError(f"{name} has the layout {x.layout}, but must be dense: pass {name}.to_dense()")
    _values(name, x)


def _values(name: str, x: torch.Tensor) -> None:
    """Refuse a view that negates: what lies at its address, where kernels and messages read, is not its values."""
    # torch.compile does not know `is_neg`, and gives operators the values of such views
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(
            f"{name} is a view of its negated values, as z.conj().imag is, but must hold its values: pass {name}.resolve_neg()"
        )


def _attention_tensor(name: str, x: Any) -> None:
    if type(x) not in PLAIN or x.is_nested or x.layout is not torch.strided:
        dense_tensor(name, x)
    shape, dtype = x.shape, x.dtype
    if len(shape) != 4:
        raise ValueError(
            f"{name} has {len(shape)} dimensions, shape {tuple(shape)}, but must have 4: (batch, tokens, heads, head_dim)"
        )
    if not 1 <= shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} has head_dim {shape[3]}, but it must be 1 to {MAX_HEAD_DIM}")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, but must be bfloat16, float16, float32 or (on CPU) float64")
    if not (x.is_cuda or x.is_cpu or x.is_meta):
        raise ValueError(f"{name} is on {x.device}, but ringattn computes on cpu and cuda devices")
    if dtype == torch.float64 and x.is_cuda:
        raise ValueError(
            f"{name} is float64 on {x.device}: GPUs compute in bfloat16, float16 or float32; float64 is for CPU tensors"
        )


def _same_kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q has {q.dtype}: cast all three to one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q is on {q.device}: move all three to one device")
