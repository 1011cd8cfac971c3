"""How bytes move between ranks: `Transport`, and one module for each way."""

from .base import Alone, Handle, Peer, Ranks, Transport
from .host_channel import HostChannel
from .loopback import LoopbackTransport, run_ranks
from .process_group import ProcessGroupTransport

__all__ = [
    "Alone",
    "Handle",
    "HostChannel",
    "LoopbackTransport",
    "Peer",
    "ProcessGroupTransport",
    "Ranks",
    "Transport",
    "run_ranks",
]
