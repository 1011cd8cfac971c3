"""Layers of transformers' models in which tokens reach each other by a convolution or a recurrence: Qwen3-Next, Mamba-2, LFM2 and others.

In transformers 5.23 these layers call a few functions of their modules' files, `causal_conv1d_fn` and others. A layer runs its own forward
pass, in which these names mean our functions (`huggingface_recurrences.py`): a copy of the code with other globals. A layer that does not
call what is expected of it is an error, so a newer version of transformers cannot be silently wrong.

A layer learns its layout and its documents from a `LiveMask`, as attention does. Models make it by `create_recurrent_attention_mask`, which
gets another meaning in the same way; Mamba's models make none and get it from `attach`'s hook.

In a call with a `RingCache`, a layer goes on from what the cache keeps of it (`generation_states.py`).
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..geometry.mask import Causal, Mask, causal, documents
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context
from .generation_states import AS_OURS, OF_CHANNELS, OF_GROUPS, VALUES_FIRST, LayerCall, OneTokenCache, OwnForm
from .huggingface_attachment import LiveMask, LivePairs, not_compiled, running_call
from .huggingface_checks import check_attention
from .huggingface_forward import attachment_of, call_name, check_runs_once
from .huggingface_inputs import CACHES
from .huggingface_recurrences import FUNCTIONS, Mixing, lightning, recurrent_block

_MASK = "create_recurrent_attention_mask"
_REBOUND = "ringattn_rebound"  # marks functions that are made here

# what layers of a kind must call, and what they may call
_CONVOLUTION = ("causal_conv1d_fn",)
_DELTA_RULE = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_KIMI = ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA2 = ("causal_conv1d_fn", "mamba2_chunk_scan")
_MAMBA = ("causal_conv1d_fn", "mamba_selective_scan")
_OPTIONAL: dict[tuple[str, ...], tuple[str, ...]] = {_MAMBA2: ("mamba2_split_conv1d_scan_combined",), _MAMBA: ("mamba_inner_fn",)}
_CALLS: dict[str, tuple[str, ...]] = {
    "qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet": _DELTA_RULE,
    "qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet": _DELTA_RULE,
    "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet": _DELTA_RULE,
    "olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet": _DELTA_RULE,
    "kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention": _KIMI,
    "bailing_hybrid.modeling_bailing_hybrid.BailingHybridDeltaAttention": _KIMI,
    "mamba2.modeling_mamba2.Mamba2Mixer": _MAMBA2,
    "bamba.modeling_bamba.BambaMixer": _MAMBA2,
    "granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer": _MAMBA2,
    "nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer": _MAMBA2,
    "falcon_h1.modeling_falcon_h1.FalconH1Mixer": _MAMBA2,
    "zamba2.modeling_zamba2.Zamba2MambaMixer": _MAMBA2,
    "mamba.modeling_mamba.MambaMixer": _MAMBA,
    "falcon_mamba.modeling_falcon_mamba.FalconMambaMixer": _MAMBA,
    "jamba.modeling_jamba.JambaMambaMixer": _MAMBA,
    "zamba.modeling_zamba.ZambaMambaMixer": _MAMBA,
    "lfm2.modeling_lfm2.Lfm2ShortConv": _CONVOLUTION,
    "lfm2_moe.modeling_lfm2_moe.Lfm2MoeShortConv": _CONVOLUTION,
    "lfm3.modeling_lfm3.Lfm3ShortConv": _CONVOLUTION,
}
# layers with a forward pass of ours, and the arguments that it takes
_WHOLE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "minimax.modeling_minimax.MiniMaxLightningAttention": (lightning, ("hidden_states",)),
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": (recurrent_block, ("input_states", "position_ids")),
}
# of states in the own code of layers for one token, by layer or by what it calls
_FORMS: dict[str | tuple[str, ...], OwnForm] = {
    "zamba.modeling_zamba.ZambaMambaMixer": OF_GROUPS,
    _MAMBA: OF_CHANNELS,
    _MAMBA2: VALUES_FIRST,
}
_NUMBER = "ringattn_mixer"  # the attribute of such a layer that counts them within its model
_UNUSED = {"position_embeddings", *CACHES}  # options of layers, of which these need none


def mixers(model: nn.Module) -> list[nn.Module]:
    """The layers in it that run around a ring with our convolutions and recurrences."""
    return [module for module in model.modules() if _name(module) in _CALLS or _name(module) in _WHOLE]


def check_mixers(modules: list[nn.Module], group: Group | None) -> None:
    """Raise ValueError if these layers cannot have our functions, in this version of transformers or with what others put in, and for a
    grid of ranks."""
    context = get_context(group)
    if modules and context.hybrid is not None:
        raise ValueError(
            f"group is {context.hybrid!r}, but the states of {type(modules[0]).__name__} pass between ranks in one row: pass the process "
            "group of all its ranks, in the order of their shards"
        )
    for module in modules:
        if "forward" in vars(module) and not _is_ours(module):
            raise ValueError(
                f"the forward of {type(module).__name__} is replaced already, as accelerate's hooks do: remove them, and attach first"
            )
        missing = [name for name in _CALLS.get(_name(module), ()) if name not in globals_of(type(module).forward)]
        if missing:
            raise ValueError(
                f"{type(module).__name__} does not call {missing[0]} in this version of transformers, so it cannot run on shards: use "
                "5.23"
            )


def put_in_mixers(model: nn.Module, modules: list[nn.Module], parts: list[nn.Module]) -> None:
    """Let these layers run around the ring, and the models that hold them (`parts`) make masks for them."""
    for number, module in enumerate(modules):
        module.forward = MethodType(_run, module)
        setattr(module, _NUMBER, number)
    for part in parts:
        if _MASK in globals_of(type(part).forward) and not _is_ours(part):
            part.forward = MethodType(rebound(type(part).forward, {_MASK: recurrent_mask}), part)


def take_out_mixers(model: nn.Module) -> None:
    """Undo `put_in_mixers`."""
    for module in model.modules():
        if _is_ours(module):
            del vars(module)["forward"]
            vars(module).pop(_NUMBER, None)


def needs_mask(model: nn.Module, modules: list[nn.Module]) -> bool:
    """Whether a model hands `attention_mask` to its layers as it is, as Mamba does, so that the hook before it must give the mask."""
    return bool(modules) and not any(_MASK in globals_of(type(part).forward) or _makes_masks(part) for part in model.modules())


@not_compiled
def recurrent_mask(*args: Any, **options: Any) -> LiveMask:
    """In the place of transformers' function of padding: what is live, for layers that are no attention."""
    call = running_call()
    return LiveMask(None, None, True) if call is None else LiveMask(call.live, None, True, call.attachment)


@not_compiled
def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a layer, around the ring. Compiled layers have a graph break here."""
    forward = type(module).forward
    given = _signature(forward).bind(module, *args, **kwargs)
    given.apply_defaults()
    mask = given.arguments["attention_mask"]
    options = {name: x for name, x in given.arguments.get("kwargs", {}).items() if name not in _UNUSED}
    mixing = _mixing(module, mask, given.arguments, options)
    given.arguments["attention_mask"] = None
    if mixing.cached is not None and mixing.cached.is_one_token and _name(module) in _CALLS:
        return _one_token(module, mixing.cached, given)
    given.arguments.update((name, None) for name in CACHES if name in given.arguments)
    if _name(module) in _WHOLE:
        run, names = _WHOLE[_name(module)]
        return run(mixing, module, *(given.arguments[name] for name in names))
    required = _CALLS[_name(module)]
    ours = {name: _noted(mixing, name) for name in (*required, *_OPTIONAL.get(required, ()))}
    out = rebound(forward, ours)(*given.args, **given.kwargs)
    missing = [name for name in required if name not in mixing.used]
    if missing:
        raise ValueError(
            f"{type(module).__name__} ran without {missing[0]}, within the shard: its own code took another way in this call, which "
            "cannot run on shards"
        )
    return out


def _one_token(module: nn.Module, cached: LayerCall, given: inspect.BoundArguments) -> Any:
    """A layer's own code for one token after those that a cache keeps, on every rank alike."""
    name = _name(module)
    form = _FORMS.get(name, _FORMS.get(_CALLS[name], AS_OURS))
    states = OneTokenCache(cached.before, form)
    given.arguments.update((name, states) for name in CACHES if name in given.arguments)
    out = type(module).forward(*given.args, **given.kwargs)
    cached.after = states.after()
    return out


def _mixing(module: nn.Module, mask: Any, arguments: Mapping[str, Any], options: dict[str, Any]) -> Mixing:
    attachment = attachment_of(module, mask)
    kind = type(module).__name__
    with refusing(attachment.ranks):
        if mask is not None and not isinstance(mask, LiveMask):
            raise ValueError(
                f"attention_mask is given to {kind}, which takes what is live from the attached model: call the model itself"
            )
        check_runs_once(module, mask)
        call = None if mask is not None else running_call()
        if call is not None and call.live is not None and (call.live.documents is not None or call.live.rows is not None):
            raise ValueError(f"{kind} is called without the mask that says where packed documents end: call the model itself")
        given = [name for name in CACHES if {**arguments.get("kwargs", {}), **arguments}.get(name) is not None]
        if given and attachment.cached is None:
            raise ValueError(
                f"{given[0]} is given, but {kind} keeps its states on shards in a RingCache alone, which the attached model is called with"
            )
        check_attention(options, attachment.ignored)
        live = attachment.live if mask is None or mask.live is None else mask.live
        if attachment.cached is not None:
            cached = attachment.cached.layer_call(getattr(module, _NUMBER))
            return Mixing(cached.layout, causal(), cached.group, call_name(module), attachment.recurrence_kernels, cached)
        return Mixing(attachment.layout, _mask_of(live, kind), attachment.group, call_name(module), attachment.recurrence_kernels)


def _mask_of(live: LivePairs, kind: str) -> Mask:
    """The documents of a recurrence: those of the call, or of the attached mask. Raises ValueError for both at once."""
    if live.mask is None or isinstance(live.mask, Causal):
        return causal() if live.documents is None else documents(cu_seqlens=live.documents.cu_seqlens, causal=True)
    if live.documents is not None:
        raise ValueError(
            f"the model was attached with mask={live.mask!r}, and a call of it tells documents, but {kind} takes one of the two: attach "
            "without a mask"
        )
    return live.mask


def _noted(mixing: Mixing, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        mixing.used.add(name)
        return FUNCTIONS[name](mixing, *args, **kwargs)

    return run


def rebound(function: Any, names: Mapping[str, Any]) -> Any:
    """A copy of a function, in which some global names mean something else; with its decorators, which hold it as `__wrapped__`.

    Raises ValueError for decorators of another kind.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _copied(function, {**function.__globals__, **names}, function.__closure__, {})
    cells = [*(function.__closure__ or ())]
    held = [i for i, cell in enumerate(cells) if _content(cell) is inner]
    if len(held) != 1:
        raise ValueError(f"{function.__qualname__} has a decorator that ringattn does not know: use transformers 5.23")
    copied = rebound(inner, names)
    cells[held[0]] = CellType(copied)
    return _copied(function, function.__globals__, tuple(cells), {"__wrapped__": copied})


def _copied(function: Any, scope: dict[str, Any], cells: tuple[CellType, ...] | None, attributes: dict[str, Any]) -> Any:
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(made).update(vars(function) | attributes | {_REBOUND: True})
    return made


@functools.lru_cache(256)
def globals_of(function: Any) -> frozenset[str]:
    """The global names that a function's own code reads: names of its file, and not attributes, which a copy would not replace."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return frozenset()
    read = {
        step.argval for code in _codes(function.__code__) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
    }
    return frozenset(name for name in read if name in function.__globals__)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _makes_masks(part: nn.Module) -> bool:
    return any(name.startswith("create_") and name.endswith("mask") for name in globals_of(type(part).forward))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


@functools.lru_cache(256)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _is_ours(module: nn.Module) -> bool:
    function = getattr(vars(module).get("forward"), "__func__", None)
    return function is not None and (function is _run or hasattr(function, _REBOUND))


def _name(module: nn.Module) -> str:
    # with the file: models loaded from the Hub with code of their own have classes of the same names
    return f"{type(module).__module__}.{type(module).__name__}".removeprefix("transformers.models.")
