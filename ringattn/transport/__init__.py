"""How bytes move between ranks: the interface `Transport`, and a module for each implementation."""

from .base import Alone, Handle, Peer, Ranks, SilentTransport, Transport
from .host_channel import HostChannel
from .loopback import LoopbackTransport, run_ranks
from .process_group import ProcessGroupTransport
from .symmetric import DEFAULT_BUDGET, AutomaticTransport, SymmetricTransport
from .torch_groups import closed_by, timeout_of

__all__ = [
    "DEFAULT_BUDGET",
    "Alone",
    "AutomaticTransport",
    "Handle",
    "HostChannel",
    "LoopbackTransport",
    "Peer",
    "ProcessGroupTransport",
    "Ranks",
    "SilentTransport",
    "SymmetricTransport",
    "Transport",
    "closed_by",
    "run_ranks",
    "timeout_of",
]
