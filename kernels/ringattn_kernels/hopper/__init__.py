"""The kernels for Hopper, where the installed version of Triton is one that they are made for.

They are written in Gluon, whose names and rules change between versions; `launch/repo/triton_versions.py` compiles them with each version
from OLDEST to NEWEST. Under any other version they are not imported, and `obstacle` says why: `dispatch` then chooses the plain kernels.
"""

import re

import triton

OLDEST, NEWEST = "3.6", "3.9"


def version_obstacle(version: str) -> str:
    """Why these kernels do not run under a version of Triton; empty where they do."""
    if _release(OLDEST) <= _release(version) <= _release(NEWEST):
        return ""
    return f"Triton {version} is not one of {OLDEST} to {NEWEST}, which the Gluon kernels are compiled and inspected with"


def _release(version: str) -> tuple[int, ...]:
    """(major, minor): bug fixes change neither names nor rules."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


obstacle = version_obstacle(triton.__version__)
if not obstacle:
    from . import backward, forward, forward_config, fused, head_dims, statistics

__all__ = [
    "NEWEST",
    "OLDEST",
    "backward",
    "forward",
    "forward_config",
    "fused",
    "head_dims",
    "obstacle",
    "statistics",
    "version_obstacle",
]
