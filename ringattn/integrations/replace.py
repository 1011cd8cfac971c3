"""`replace_attention`: run the attention modules of a hand-written model around a ring.

    ra.replace_attention(model, layout=layout, group=ring)

Most modules end in `torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)`. While a chosen module runs, that call
runs `ring_attention` instead; projections, rotary embeddings and norms stay as they are. Such a call in any other module is an error,
unless modules were chosen by hand. A module that computes attention by hand takes three more lines: let it call a function or an
attribute, and set that to `ring_attention`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..runtime.groups import Group, get_context
from ..scores import ScoreMod
from ..training.checkpoint import runs_again_reentrantly
from .sdpa import Around, bound, refuse
from .token_mixers import check_token_mixers

__all__ = ["Replaced", "replace_attention"]

_ORIGINAL = torch.nn.functional.scaled_dot_product_attention
_PAST = "ringattn_past"  # the attribute of a module that holds its `_Past`

_Options = tuple[Layout | None, Mask | None, Group | None, ScoreMod | None]


@dataclass(frozen=True)
class Replaced:
    """The modules whose attention was replaced; `restore` undoes it."""

    modules: tuple[nn.Module, ...]
    _watched: nn.Module | None = None

    def restore(self) -> None:
        """Run the modules on whole sequences again; a second call does nothing."""
        for module in self.modules:
            vars(module).pop("forward", None)
        watch = vars(self._watched).get("forward") if self._watched is not None else None
        if isinstance(watch, _Watched):
            watch.remove()


def replace_attention(
    model: nn.Module,
    *,
    layout: Layout | None = None,
    mask: Mask | None = None,
    group: Group | None = None,
    score: ScoreMod | None = None,
    modules: Callable[[str, nn.Module], bool] | Iterable[nn.Module] | None = None,
) -> Replaced:
    """Run a model's scaled_dot_product_attention around a ring, from the next forward on.

    Args:
        model: any nn.Module; call it with this rank's rows, and give rotary or learned positions `layout.positions(rank)`.
        layout: which positions each rank holds; None for `default_layout` of the mask.
        mask: which pairs are live, None for all; in a call with `is_causal=True`, only the causal ones of these.
        group: the ranks of the ring, as for `ring_attention`.
        score: what else happens to scores and weights, from `score(...)`. `dropout_p` of a call takes the place of its dropout. Without a
            seed in the score, each call draws one from torch's generator for the CPU, which must be in the same state on all ranks.
        modules: the modules whose calls are replaced, or a predicate of a module's name and the module. Calls of others then stay
            within the shard. By default all modules that make the call in their own forward pass, or have "attention" or "attn" in the
            name of their class; the same call anywhere else in the model is an error.

    The calls take q (b, h, s, d), k and v, as in torch. Raises ValueError if no module is chosen, if one is chosen twice, if one
    holds a `torch.nn.MultiheadAttention`, whose calls this cannot see, for a model of transformers (see
    `ringattn.integrations.huggingface.attach`), and for layers that mix tokens by other means, such as convolutions.
    The forward pass raises ValueError, on every rank, for an `attn_mask`, for fewer heads in k without `enable_gqa=True`,
    for reentrant activation checkpointing within a chosen module (around one it works, as long as the layout stays), and for a chosen
    module that does not call scaled_dot_product_attention.

    >>> import torch, ringattn as ra
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> model = Attention()
    >>> replaced = ra.replace_attention(model)
    >>> model(torch.randn(1, 2, 16, 8)).shape
    torch.Size([1, 2, 16, 8])
    """
    get_context(group)
    check.instance("model", model, nn.Module, "pass the model itself")
    check.optional("layout", layout, Layout, check.BUILD_A_LAYOUT)
    check.optional("mask", mask, Mask, check.BUILD_A_MASK)
    check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
    _check_model(model)
    chosen = _chosen(model, modules)
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no module that calls scaled_dot_product_attention, and none with attention or attn in the "
            "name of its class: pass modules=[...] or a predicate"
        )
    for i, module in enumerate(chosen):
        if "forward" in vars(module):
            raise ValueError(f"the forward of {type(module).__name__} is replaced already: restore() it first")
        if any(module is other for other in chosen[:i]):
            raise ValueError(f"modules holds the same {type(module).__name__} twice: give each once")
        if any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
            raise ValueError(
                f"{type(module).__name__} computes attention by torch.nn.MultiheadAttention, which does not make the call to replace: "
                "choose other modules, and call ringattn.ring_attention in this one"
            )
    for module in chosen:
        module.forward = _Forward(module, layout, mask, group, score)
    watched = model if modules is None and chosen != [model] else None
    if watched is not None:
        watched.forward = _Watched(watched, vars(watched).get("forward"), group)
    return Replaced(tuple(chosen), watched)


def _check_model(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            raise ValueError(
                f"{type(module).__name__} is a model of transformers: use ringattn.integrations.huggingface.attach, which fills in its "
                "positions and refuses what cannot run on shards"
            )
    check_token_mixers(model)


def _chosen(model: nn.Module, modules: Callable[[str, nn.Module], bool] | Iterable[nn.Module] | None) -> list[nn.Module]:
    if modules is None:
        return attention_modules(model)
    if callable(modules):
        return [x for name, x in model.named_modules() if modules(name, x)]
    chosen = check.listed("modules", modules, "a list of modules, or a predicate of a name and a module")
    own = {id(module) for module in model.modules()}
    for module in chosen:
        if id(module) not in own:
            raise ValueError(f"modules holds a {type(module).__name__} that is not part of the model")
    return chosen


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `replace_attention` chooses by default."""
    # a chosen module covers the modules inside it
    named = [(name, x) for name, x in model.named_modules() if _looks_like_attention(x)]
    return [x for name, x in named if not any(_within(name, outer) for outer, _ in named)]


def _looks_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "attention" in name or "attn" in name or (code is not None and _ORIGINAL.__name__ in code.co_names)


def _within(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


class _Forward:
    """A module's forward with its calls replaced."""

    def __init__(
        self, module: nn.Module, layout: Layout | None, mask: Mask | None, group: Group | None, score: ScoreMod | None
    ) -> None:
        self.module = module
        self.options: _Options = layout, mask, group, score
        # the module may run again, in a backward pass, for a forward pass of an earlier time
        self.past = vars(module)[_PAST] = _Past(self.options, vars(module).get(_PAST))
        self.around = Around(layout, mask, group, score)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.past.has_changed and not torch.compiler.is_compiling() and runs_again_reentrantly():
            raise ValueError(
                f"{type(self.module).__name__} runs again in the backward pass under reentrant activation checkpointing, and has been "
                "replaced with several layouts, masks or groups, so it is unknown which one its forward pass had: give checkpoint "
                "use_reentrant=False"
            )
        calls = _Calls(self.around)
        with calls:
            result = type(self.module).forward(self.module, *args, **kwargs)
        if not calls.count:
            refuse(
                self.around.group,
                f"{type(self.module).__name__} calls no scaled_dot_product_attention, so nothing was replaced: choose other modules, "
                "or call ringattn.ring_attention in it",
            )
        return result

    def __deepcopy__(self, memo: dict) -> _Forward:
        # a process group cannot be copied, and a copied model stays on the same ring
        return _Forward(copy.deepcopy(self.module, memo), *self.options)


class _Past:
    """What a module was replaced with last, and whether it ever was with something else."""

    def __init__(self, options: _Options, before: _Past | None) -> None:
        self.options = options
        self.has_changed = before is not None and (
            before.has_changed
            or before.options[:2] != options[:2]
            or any(a is not b for a, b in zip(before.options[2:], options[2:]))
        )

    def __deepcopy__(self, memo: dict) -> _Past:
        return self  # a process group cannot be copied


class _Watched:
    """A model's forward, in which a call of attention outside of the chosen modules is an error."""

    def __init__(self, model: nn.Module, before: Callable[..., Any] | None, group: Group | None) -> None:
        self.model, self.before, self.group = model, before, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Outside(self.group):
            return type(self.model).forward(self.model, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> _Watched:
        return _Watched(copy.deepcopy(self.model, memo), copy.deepcopy(self.before, memo), self.group)

    def remove(self) -> None:
        vars(self.model).pop("forward")
        if self.before is not None:
            vars(self.model)["forward"] = self.before


class _Outside(TorchFunctionMode):
    """While it is on, calls of attention are errors. Chosen modules, whose own mode lies above, do not make any."""

    _CALLS = (_ORIGINAL, torch.nn.functional.multi_head_attention_forward)

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in self._CALLS:
            refuse(
                self.group,
                f"{func.__name__} is called outside of the replaced modules, where it would attend within the shard: choose the modules "
                "that call it, replace_attention(model, modules=[...])",
            )
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """While it is on, calls of scaled_dot_product_attention run ring_attention; `count` counts them."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self.around = around
        self.count = 0
        self.grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not _ORIGINAL:
            return func(*args, **kwargs)
        self.count += 1
        if self.grad and not torch.is_grad_enabled():
            refuse(
                self.around.group,
                "attention runs without gradients inside a module that has them, as under reentrant activation checkpointing, whose "
                "second forward pass would attend within the shard: checkpoint the whole module, or choose the module inside",
            )
        return bound(self.around, *args, **kwargs)
