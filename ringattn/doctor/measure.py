"""What the doctor measures: clocks, speed of each rank, links between ranks, collectives, and one exact step.

In each check every rank calls `observe`; then all ranks call `judge` on the records of all.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ringattn as ra

from ..runtime.groups import Group
from .facts import Finding, Site, Verdict, named

now = time.time


class Clock:
    """Each host's clock against that of rank 0's host. Clocks must agree for logs to be comparable."""

    name = "clocks"

    def observe(self, site: Site) -> float:
        """Seconds that this rank's clock is ahead of rank 0's, by the quickest of five round trips (Cristian 1989)."""
        offset, quickest = 0.0, float("inf")
        for host in sorted(set(site.hosts) - {site.hosts[0]}):
            rank = site.hosts.index(host)
            for n in range(5):
                ask, answer = f"clock/{rank}/{n}/ask", f"clock/{rank}/{n}/answer"
                if site.rank == rank:
                    sent = now()
                    site.board.store.set(ask, "")
                    there = float(site.board.store.get(answer))
                    received = now()
                    if received - sent < quickest:
                        quickest, offset = received - sent, (sent + received) / 2 - there
                elif site.rank == 0:
                    site.board.store.get(ask)
                    site.board.store.set(answer, repr(now()))
        return offset

    def judge(self, site: Site, records: list[float]) -> Finding:
        first = {host: site.hosts.index(host) for host in site.hosts}
        off = [rank for rank in first.values() if abs(records[rank]) > site.skew]
        if off:
            shown = ", ".join(f"{site.hosts[rank]} is {records[rank]:+.3f} s off" for rank in off)
            return Finding(self.name, Verdict.LOOK, f"{shown} rank 0's host (more than {site.skew} s)", tuple(off), records)
        most = max(abs(records[rank]) for rank in first.values())
        return Finding(
            self.name, Verdict.FINE, f"{len(first)} host{'s' * (len(first) > 1)}, within {1e3 * most:.1f} ms", (), records
        )


class Speed:
    """The same matrix products on every rank at once, and the GPU's clock and temperature after them."""

    name = "speed"

    def observe(self, site: Site) -> dict[str, float | None]:
        site.board.swap("ready")
        record: dict[str, float | None] = {"seconds": product_seconds(site.device), "MHz": None, "Celsius": None}
        if site.device.type == "cuda":
            # they stay unknown without nvidia-ml-py, or where it has no permission
            with contextlib.suppress(ModuleNotFoundError, RuntimeError):
                record |= {"MHz": torch.cuda.clock_rate(site.device), "Celsius": torch.cuda.temperature(site.device)}
        return record

    def judge(self, site: Site, records: list[dict[str, float]]) -> Finding:
        seconds = [record["seconds"] for record in records]
        middle = statistics.median_low(seconds)
        slow = [rank for rank, time in enumerate(seconds) if time > site.slow * middle]
        if slow:
            shown = "; ".join(f"rank {r} takes {seconds[r] / middle:.2f} times the median{_state(records[r])}" for r in slow[:4])
            text = f"{shown} (more than {site.slow})"
            return Finding(self.name, Verdict.LOOK, text, tuple(slow), records)
        text = f"median {1e3 * middle:.2f} ms, slowest rank {seconds.index(max(seconds))} at {max(seconds) / middle:.2f} times it"
        return Finding(self.name, Verdict.FINE, text + _state(records[0]), (), records)


def _state(record: dict[str, Any]) -> str:
    return "" if record["MHz"] is None else f" ({record['MHz']} MHz, {record['Celsius']} C after it)"


def product_seconds(device: torch.device) -> float:
    """Seconds of a matrix product: on a GPU the median once its clocks have settled, on a CPU the least."""
    on_gpu = device.type == "cuda"
    # random numbers: equal ones draw less power, which would hide a GPU that throttles
    x = torch.randn((8192,) * 2 if on_gpu else (384,) * 2, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    times = []
    for _ in range(200 if on_gpu else 7):
        settle(device)
        began = time.perf_counter()
        torch.mm(x, x)
        settle(device)
        times.append(time.perf_counter() - began)
    # a GPU slows down as it warms up, so take the later half; on a CPU the load of other processes must not count
    return statistics.median(times[100:]) if on_gpu else min(times)


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Links:
    """GB/s per direction between each two ranks, both directions at once.

    Rounds of disjoint pairs, so that a slow rank slows only its partner.
    """

    name = "links"

    def observe(self, site: Site) -> dict[str, list]:
        on_gpu = site.device.type == "cuda"
        payload = torch.ones(2**28 if on_gpu else 2**18, dtype=torch.uint8, device=site.device)
        room = torch.empty_like(payload)
        speeds = [0.0] * site.size
        for n, partner in enumerate(partners(site.rank, site.size)):
            site.board.at(f"links, round {n}" + (f" with rank {partner}" if partner is not None else ""))
            seconds = min(transfer(payload, room, partner, site.group) for _ in range(4))
            if partner is not None:
                speeds[partner] = payload.numel() / seconds / 1e9
        closed = []
        if on_gpu:
            here = site.peers(site.rank)
            if len(here) <= torch.cuda.device_count():
                # local rank n has the host's n-th GPU
                mine = here.index(site.rank)
                devices = {rank: n for n, rank in enumerate(here) if rank != site.rank}
                closed = [rank for rank, n in devices.items() if not torch.cuda.can_device_access_peer(mine, n)]
        return {"GB/s with": speeds, "no P2P with": closed}

    def judge(self, site: Site, records: list[dict[str, list]]) -> Finding:
        closed = [rank for rank, record in enumerate(records) if record["no P2P with"]]
        if closed:
            without = named(records[closed[0]]["no P2P with"])
            text = f"no peer-to-peer access between rank {closed[0]} and {without}: see nvidia-smi topo -m"
            return Finding(self.name, Verdict.LOOK, text, tuple(closed), records)
        texts, slow = [], []
        for kind, same in (("within a host", True), ("between hosts", False)):
            pairs = {
                (a, b): min(records[a]["GB/s with"][b], records[b]["GB/s with"][a])
                for a in range(site.size)
                for b in range(a)
                if (site.hosts[a] == site.hosts[b]) == same
            }
            if pairs:
                # take the upper quartile: one slow rank of three spoils two of the three pairs
                usual = sorted(pairs.values())[len(pairs) * 3 // 4]
                least = min(pairs, key=lambda pair: pairs[pair])
                texts.append(
                    f"{kind} {usual:.3g} GB/s a direction, least {pairs[least]:.3g} between ranks {least[1]} and {least[0]}"
                )
                slow += [pair for pair, speed in pairs.items() if speed < site.link * usual]
        if slow:
            text = "; ".join(texts) + f" (under {site.link} of the upper quartile)"
            return Finding(self.name, Verdict.LOOK, text, at_fault(slow), records)
        return Finding(self.name, Verdict.FINE, "; ".join(texts) or "one rank", (), records)


def partners(rank: int, size: int) -> list[int | None]:
    """The partner of a rank in each round of a tournament where all meet all; None in a round that it sits out."""
    seats = size + size % 2
    met = []
    for n in range(seats - 1):
        # the last seat is fixed, the others rotate
        if rank == seats - 1:
            other = n * (seats // 2) % (seats - 1)
        else:
            other = (n - rank) % (seats - 1)
            other = seats - 1 if other == rank else other
        met.append(other if other < size else None)
    return met


def transfer(payload: torch.Tensor, room: torch.Tensor, partner: int | None, group: dist.ProcessGroup) -> float:
    """Seconds of sending to a partner and receiving from it at the same time; all ranks start together."""
    dist.all_reduce(torch.zeros(1, device=payload.device), group=group)
    if payload.is_cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        exchange(payload, room, partner, group)
        end.record()
        torch.cuda.synchronize(payload.device)
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    exchange(payload, room, partner, group)
    return time.perf_counter() - began


def exchange(payload: torch.Tensor, room: torch.Tensor, partner: int | None, group: dist.ProcessGroup) -> None:
    """Send to a partner, if there is one, and receive from it."""
    if partner is not None:
        sends, receives = dist.P2POp(dist.isend, payload, partner, group), dist.P2POp(dist.irecv, room, partner, group)
        for request in dist.batch_isend_irecv([sends, receives]):
            request.wait()


def at_fault(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """The fewest ranks that explain the slow pairs, found greedily: first the rank in most pairs. Of a lone pair, both ranks."""
    chosen = []
    while pairs:
        counts = Counter(rank for pair in pairs for rank in pair).most_common()
        worst = [rank for rank, count in counts if count == counts[0][1]]
        if len(worst) > 1 and counts[0][1] > 1 and all(set(pair) <= set(worst) for pair in pairs):
            chosen += worst
            break
        chosen += worst if counts[0][1] == 1 else worst[:1]
        pairs = [pair for pair in pairs if not set(pair) & set(chosen)]
    return tuple(sorted(chosen))


class Collectives:
    """All-gather and all-reduce of known integers, every element compared."""

    name = "collectives"

    def observe(self, site: Site) -> dict[str, Any]:
        mine = pattern(site.rank, site.device)
        everyone = [torch.empty_like(mine) for _ in range(site.size)]
        dist.all_gather(everyone, mine, group=site.group)
        total = mine.clone()
        dist.all_reduce(total, group=site.group)
        expected = [pattern(rank, site.device) for rank in range(site.size)]
        wrong = [rank for rank in range(site.size) if not torch.equal(everyone[rank], expected[rank])]
        return {"wrong from": wrong, "wrong sums": int((total != sum(expected)).sum())}

    def judge(self, site: Site, records: list[dict[str, Any]]) -> Finding:
        votes = Counter(rank for record in records for rank in record["wrong from"])
        senders = tuple(sorted(rank for rank, count in votes.items() if 2 * count > site.size - 1))
        if senders:
            return Finding(self.name, Verdict.LOOK, f"most ranks receive wrong data from {named(senders)}", senders, records)
        wrong = tuple(r for r, record in enumerate(records) if record["wrong sums"] or record["wrong from"])
        if wrong:
            text = (
                f"{named(wrong)}: {records[wrong[0]]['wrong sums']} wrong sums, wrong data from {records[wrong[0]]['wrong from']}"
            )
            return Finding(self.name, Verdict.LOOK, text, wrong, records)
        return Finding(self.name, Verdict.FINE, f"all-reduce and all-gather right over {dist.get_backend(site.group)}", (), records)


def pattern(rank: int, device: torch.device) -> torch.Tensor:
    """Small integers whose sums fp32 holds exactly."""
    return (rank + 1) * (1.0 + torch.arange(1 << 20 if device.type == "cuda" else 1 << 12, device=device) % 61)


class Exactness:
    """One causal `ring_attention`, forward and backward: each rank's rows against dense attention on the whole sequence."""

    name = "exactness"

    def observe(self, site: Site) -> dict[str, Any]:
        on_gpu = site.device.type == "cuda"
        tokens, head_dim = (min(512 * site.size, 8192), 128) if on_gpu else (24 * site.size + 5, 32)
        dtype, wide = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32, torch.float64)
        layout = ra.zigzag(tokens, site.size)
        try:
            return shares(
                site.group, site.rank, site.device, layout, ra.causal(), (4, 2, head_dim), dtype, wide, name="the doctor's"
            )
        except ValueError as error:
            return {"refused": str(error)}

    def judge(self, site: Site, records: list[dict[str, Any]]) -> Finding:
        refused = [rank for rank, record in enumerate(records) if "refused" in record]
        if refused:
            return Finding(self.name, Verdict.LOOK, f"{named(refused)}: {records[refused[0]]['refused']}", tuple(refused), records)
        # out and dq are a rank's own work; dk and dv are sums over ranks, which one rank can spoil for all
        # `not <=` also catches NaN
        own = tuple(r for r, record in enumerate(records) if not (record["out"] <= 1 and record["dq"] <= 1))
        wrong = own or tuple(r for r, record in enumerate(records) if not (record["dk"] <= 1 and record["dv"] <= 1))
        if wrong:
            worst = {name: f"{share:.3g}" for name, share in records[wrong[0]].items() if not share <= 1}
            text = f"{named(wrong)}: error over what is allowed on rank {wrong[0]}: {worst}"
            return Finding(self.name, Verdict.LOOK, text, wrong, records)
        most = max(max(record.values()) for record in records)
        return Finding(self.name, Verdict.FINE, f"out and gradients within {most:.2f} of the error allowed", (), records)


def shares(
    group: Group | None,
    rank: int,
    device: torch.device,
    layout: ra.Layout,
    mask: ra.Mask,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    wide: torch.dtype,
    name: str,
) -> dict[str, float]:
    """The errors of a rank's out, dq, dk and dv, over what the contract of docs/architecture.md allows; a collective.

    sizes: query heads, key/value heads and the head dim. wide: the dtype that counts as exact.
    """
    heads, kv_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, layout.seq_len, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    whole = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    dense = partial(ra.reference.attention, mask=mask)
    around = partial(ra.ring_attention, mask=mask, layout=layout, group=group, name=name)
    exact, rounded = (step(dense, [x.to(kind) for x in whole]) for kind in (wide, dtype))
    got = step(around, [ra.shard(x, layout, rank) for x in whole])
    found: dict[str, float] = {}
    for part, ours, theirs, truth in zip(("out", "dq", "dk", "dv"), got, rounded, exact):
        error = (ours.to(wide) - ra.shard(truth, layout, rank)).abs()
        # at least one rounding of the largest value is allowed
        allowed = (2 if part == "out" else 3) * (theirs.to(wide) - truth).abs().max()
        largest, of_dv = truth.abs().max(), exact[-1].abs().max()
        if largest <= 100 * torch.finfo(wide).eps * of_dv:  # dq and dk are 0 if each query sees one key: what is left is rounding
            largest = of_dv
        rounding = torch.finfo(dtype).eps * largest
        found[part] = (error.max() / torch.maximum(allowed, rounding)).item() if error.numel() else 0.0
    return found


def step(attention: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """(out, dq, dk, dv) of attention on (q, k, v, dout)."""
    *leaves, dout = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)
