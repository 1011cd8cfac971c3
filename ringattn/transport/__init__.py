"""How bytes move between ranks: `Transport`, and one module for each way."""

from .base import Alone, Handle, Peer, Transport
from .loopback import LoopbackTransport, run_ranks
from .process_group import ProcessGroupTransport

__all__ = ["Alone", "Handle", "LoopbackTransport", "Peer", "ProcessGroupTransport", "Transport", "run_ranks"]
