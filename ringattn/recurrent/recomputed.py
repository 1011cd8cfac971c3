"""Local tensors that a backward pass computes anew, and the gradients that go back through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def leaves_of(tensors: Iterable[torch.Tensor | None], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """The tensors, cut from their history; they require gradients where these are wanted."""
    return [None if x is None else x.detach().requires_grad_(needed) for x, needed in zip(tensors, wanted)]


def gradients_of(
    leaves: Iterable[torch.Tensor | None], results: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor | None]:
    """The gradient of each leaf that requires one, from pairs of a result and its gradient: zeros, where no result depends on it."""
    kept = list(leaves)
    live = [(x, gradient) for x, gradient in results if x.requires_grad]
    sources = [x for x in kept if x is not None and x.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(sources)
    if live and sources:
        found = torch.autograd.grad([x for x, _ in live], sources, [gradient for _, gradient in live], allow_unused=True)
    filled = iter(torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(sources, found))
    return [next(filled) if x is not None and x.requires_grad else None for x in kept]


def saving_is_hooked() -> bool:
    """Whether checkpointing, offloading or the like gets what autograd saves: a graph within a graph would make it compute twice."""
    autograd = torch._C._autograd
    return autograd._top_saved_tensors_default_hooks(False) is not None
