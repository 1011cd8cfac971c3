"""Counts the memory of tensors as they are made and freed, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringattn.transport import Handle
from ringattn.transport.loopback import LoopbackTransport


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


class Kept(Handle):
    """Messages under way: they keep the tensors that are sent, until their receivers have copied them."""

    def __init__(self, transport, sends, receives):
        self.transport, self.sends, self.receives = transport, sends, receives

    def wait(self):
        for peer, target in self.receives:
            target.copy_(self.transport._mailboxes.box(peer, self.transport.rank, "data").get(timeout=60))
            self.transport._mailboxes.box(self.transport.rank, peer, "taken").put(True)
        for peer, _ in self.sends:
            self.transport._mailboxes.box(peer, self.transport.rank, "taken").get(timeout=60)
        self.sends = self.receives = ()


class WithoutCopies(LoopbackTransport):
    """Threads as ranks whose messages are not copied on their way, so that no memory of the transport is counted."""

    def exchange(self, sends, receives, *, at_rest=False):
        for peer, x in sends:
            self._mailboxes.box(self.rank, peer, "data").put(x)
        return Kept(self, list(sends), list(receives))
