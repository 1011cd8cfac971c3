"""Counts the memory of tensors as they are made and freed, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """`peak`: the most bytes of tensors alive at once, without those `given`. `largest`: elements of the largest tensor."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self.given = [x.untyped_storage() for x in given]
        self.seen = weakref.WeakSet(self.given)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
                storage = x.untyped_storage()
                if storage not in self.seen:
                    self.seen.add(storage)
                    self.alive += storage.nbytes()
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size):
        self.alive -= size
