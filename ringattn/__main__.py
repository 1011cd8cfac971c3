"""`python -m ringattn`: `plan` predicts what a layer's attention takes on given GPUs, and `warm` compiles kernels ahead of time.

Under torchrun, `doctor` examines a job's machines, `verify` compares attention on its ranks with dense attention, and `share` runs a
program whose ranks share GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from ._version import __version__
from .check import integer
from .doctor import examination
from .doctor.verify import verify_attention
from .geometry.layout import Layout, balanced, contiguous, default_layout, striped, zigzag
from .geometry.mask import Mask, causal, documents, full, sliding_window
from .geometry.placement import placed
from .predict import timeline
from .predict.machine import MACHINES, Machine
from .predict.planner import check_work, held_bytes, options, predict, recommend
from .predict.recurrence import RecurrentPrediction, RecurrentWork, predict_recurrence
from .predict.simulation import Prediction, Workload
from .recurrent.warmup import KINDS, warm_recurrent
from .sharing import run_shared
from .warmup import warm

_GIB = 1 << 30
LAYOUTS: dict[str, Callable[[Mask, int, int], Layout]] = {
    "balanced": balanced,
    "contiguous": lambda _, *sizes: contiguous(*sizes),
    "default": default_layout,
    "placed": placed,
    "striped": lambda _, *sizes: striped(*sizes),
    "zigzag": lambda _, *sizes: zigzag(*sizes),
}
_TIMES, _BYTES = ("forward", "total", "exposed"), ("sent", "sent_between_nodes")
_COLUMNS = (
    "forward ms | fwd+bwd ms | exposed ms | TFLOP/s a GPU | share of the kernels' rate | sent GiB | between nodes GiB | peak GiB"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; None means the process's own."""
    parser = argparse.ArgumentParser(prog="python -m ringattn", description="Attention over sequences too long for one GPU.")
    parser.add_argument("--version", action="version", version=f"ringattn {__version__} (torch {torch.__version__})")
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser(
        "plan",
        help="predict time, communication and memory of each schedule",
        description=(
            "For one number of GPUs and one length, a table of the schedules; for several, the best schedule of each. The mask "
            "window:TOKENS is causal with the last TOKENS keys, documents:MEAN packs causal documents of log-normal lengths with this mean."
        ),
    )
    plan.add_argument("--gpus", type=int, nargs="+", help="GPUs in all (default: those of one node)")
    plan.add_argument("--gpus-per-node", type=int, default=8, help="(default 8)")
    plan.add_argument(
        "--tokens", type=count, nargs="+", required=True, help="tokens of the whole sequence, such as 65536, 64K or 1M"
    )
    plan.add_argument(
        "--kv-tokens",
        type=count,
        help="keys, if they are others than the queries: an encoder's states, or a document whose last chunk is --tokens",
    )
    plan.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    plan.add_argument("--kv-heads", type=int, default=8, help="K/V heads (default 8)")
    plan.add_argument("--head-dim", type=int, default=128, help="(default 128)")
    plan.add_argument("--mask", default="causal", help="causal (default), full, window:TOKENS or documents:MEAN")
    plan.add_argument("--layout", choices=sorted(LAYOUTS), default="default", help="(default: the mask's default layout)")
    plan.add_argument(
        "--memory-gib",
        type=float,
        help="GPU memory for attention beyond q, k, v, out and their gradients (default: all that these leave free)",
    )
    plan.add_argument(
        "--machine",
        type=machine_name,
        choices=sorted(MACHINES),
        default="h200",
        help="(default h200, the only one that was measured)",
    )
    plan.add_argument("--rates", nargs="+", default=[], metavar="NAME=VALUE", help="machine figures to replace, e.g. node_gbs=90")
    plan.add_argument("--nccl", action="store_true", help="move messages over NCCL within nodes too, not by copy engines")
    plan.add_argument(
        "--recurrent",
        metavar="KIND:HEADS:D_K:D_V",
        help="a layer with a state, beside attention: none, number, vector (its decays), delta or delta-vector (the delta rule with a "
        "number or a vector); delta:32:128:128 is Qwen3-Next's",
    )
    plan.add_argument(
        "--convolution",
        metavar="CHANNELS:WIDTH",
        help="of the recurrent layer, whose halos are sent; 8192:4 is Qwen3-Next's; with --recurrent",
    )
    plan.add_argument(
        "--layers", metavar="ATTENTION:RECURRENT", help="add up so many layers of both, such as 6:18; with --recurrent"
    )
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")
    plan.add_argument("--timeline", metavar="PNG", help="draw the recommended schedule, step by step; needs matplotlib")
    plan.set_defaults(run=_plan, command=plan)
    ready = commands.add_parser(
        "warm",
        help="compile the kernels into Triton's cache",
        description="Run it once on each machine with GPUs, or once with TRITON_CACHE_DIR in a folder that all of them share.",
    )
    ready.add_argument(
        "--head-dim", type=int, nargs="+", help="of q and k of attention (default 128; with --recurrent alone no attention)"
    )
    ready.add_argument("--v-head-dim", type=int, help="of v (default: the same)")
    ready.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    ready.add_argument("--softcap", type=float, help="of the scores (Gemma 2)")
    ready.add_argument("--alibi", action="store_true", help="with the slopes of ALiBi")
    ready.add_argument("--sinks", action="store_true", help="with learned sinks (GPT-OSS)")
    ready.add_argument("--bias", action="store_true", help="with learned biases of relative positions (T5)")
    ready.add_argument("--dropout", action="store_true", help="with dropout of weights")
    ready.add_argument(
        "--recurrent",
        nargs="+",
        metavar="KIND:HEADS:D_K:D_V",
        help="also compile and tune fla's kernels of these layers with states; KIND as for plan, and the heads of queries and keys may "
        "follow, as in delta:32:128:128:16 of Qwen3-Next. fla keeps what its tuner chose in Triton's cache",
    )
    ready.add_argument("--ranks", type=int, default=3, help="the most ranks of such layers' calls (default 3, as for all above)")
    ready.add_argument(
        "--tokens", type=count, default=16384, help="tokens of a rank, in calls of such layers that are timed (default 16K)"
    )
    ready.add_argument("--processes", type=int, help="that compile for such layers (default: one a core, at most 32)")
    ready.set_defaults(run=_warm, command=ready)
    doctor = commands.add_parser(
        "doctor",
        parents=[examination.options()],
        help="examine the machines of a job before a long run",
        description="On every rank of a job: torchrun --nproc-per-node 8 -m ringattn doctor. The exit status is 0 if all is well.",
    )
    doctor.set_defaults(run=_doctor, command=doctor)
    exact = commands.add_parser(
        "verify",
        help="compare attention on the ranks of a job with dense attention",
        description=(
            "On every rank of a job: torchrun --nproc-per-node 8 -m ringattn verify. Each rank holds dense attention over the whole "
            "sequence, too. For a model, see ringattn.verify. The exit status is 0 if errors are within those allowed."
        ),
    )
    exact.add_argument("--tokens", type=count, default=2048, help="tokens of the whole sequence, such as 2048 or 2K (default 2048)")
    exact.add_argument("--heads", type=int, default=4, help="query heads (default 4)")
    exact.add_argument("--kv-heads", type=int, default=2, help="K/V heads (default 2)")
    exact.add_argument("--head-dim", type=int, default=128, help="(default 128)")
    exact.add_argument("--mask", default="causal", help="causal (default), full, window:TOKENS or documents:MEAN")
    exact.add_argument("--layout", choices=sorted(LAYOUTS), default="default", help="(default: the mask's default layout)")
    exact.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    exact.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="(default bfloat16, on CPUs float32)")
    exact.set_defaults(run=_verify, command=exact)
    shared = commands.add_parser(
        "share",
        help="run a program on more ranks than there are GPUs",
        description=(
            "On every rank of a job: torchrun --nproc-per-node 8 -m ringattn share train.py --steps 10. Ranks take turns on the GPUs: "
            "results are those of as many GPUs as ranks, times are not. The program's LOCAL_RANK is its GPU."
        ),
    )
    shared.add_argument("-m", action="store_true", dest="is_module", help="PROGRAM is the name of a module")
    shared.add_argument("program", help="a script")
    shared.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    shared.set_defaults(run=_share, command=shared)
    given = parser.parse_args(arguments)
    status = 0
    try:
        status = given.run(given)
    except ValueError as error:
        given.command.error(str(error))
    if status:
        sys.exit(status)


def count(text: str) -> int:
    """A number of tokens: 65536, 64K or 1M, where K is 1,024 and M is 1,048,576."""
    number = _tokens(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: give one such as 65536, 64K or 1M")
    return number


def _tokens(text: str) -> int | None:
    """As `count`; None for what is no whole number."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    try:
        number = int(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        return None
    return int(number) if isfinite(number) and number == int(number) else None


def machine_name(text: str) -> str:
    """The name of a machine, in letters of any case; MI300 is the MI300X."""
    return {"mi300": "mi300x"}.get(text.lower(), text.lower())


def _doctor(given: argparse.Namespace) -> int:
    examination.complete(given)
    return examination.examine_job(given)


def _verify(given: argparse.Namespace) -> int:
    sizes = given.heads, given.kv_heads, given.head_dim
    for name, value in zip(("tokens", "heads", "kv_heads", "head_dim"), (given.tokens, *sizes)):
        integer(name, value, least=1)
    mask = parse_mask(given.mask, given.tokens)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    name = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
    return verify_attention(LAYOUTS[given.layout](mask, given.tokens, ranks), mask, sizes, getattr(torch, name), given.device)


def _share(given: argparse.Namespace) -> None:
    run_shared([*["-m"] * given.is_module, given.program, *given.arguments])


def _warm(given: argparse.Namespace) -> None:
    dtype = getattr(torch, given.dtype)
    dims = given.head_dim if given.head_dim or given.recurrent else [128]
    if given.recurrent:
        sizes = dict(ranks=given.ranks, tokens=given.tokens, processes=given.processes)
        compiled, tuned = warm_recurrent(given.recurrent, dtype=dtype, **sizes)
        print(
            f"fla's kernels of {', '.join(given.recurrent)} in {given.dtype} are compiled, {compiled:.1f} s, and tuned, {tuned:.1f} s"
        )
    if dims:
        score = dict(softcap=given.softcap, alibi=given.alibi, sinks=given.sinks, bias=given.bias, dropout=given.dropout)
        seconds = warm(dims, v_head_dim=given.v_head_dim, dtype=dtype, **score)
        print(f"kernels of head dim {', '.join(map(str, dims))} in {given.dtype} are compiled: {seconds:.1f} s")


def _plan(given: argparse.Namespace) -> None:
    machine = MACHINES[given.machine].with_rates(dict(_rate(text) for text in given.rates))
    worlds = list(product(given.gpus or [given.gpus_per_node], given.tokens))
    if given.timeline and len(worlds) > 1:
        raise ValueError(f"--timeline draws one world, but {len(worlds)} are given: give one value of --gpus and one of --tokens")
    if given.timeline:
        timeline.need_figures()
    states = _recurrent(given)
    found = []
    for gpus, tokens in worlds:
        mask = parse_mask(given.mask, tokens)
        keys = {}
        if given.kv_tokens is not None:
            if given.mask.startswith("documents"):
                raise ValueError(
                    "--kv-tokens goes with the masks causal, full and window:TOKENS, whose last query is at the last key"
                )
            keys = dict(kv_tokens=given.kv_tokens, q_offset=max(0, given.kv_tokens - tokens))
        work = Workload(tokens, given.heads, given.kv_heads, given.head_dim, mask, LAYOUTS[given.layout], **keys)
        check_work(work, gpus, given.gpus_per_node)
        memory = _budget(given.memory_gib, machine, work, gpus)
        predictions = [
            predict(machine, work, gpus, given.gpus_per_node, option)
            for option in options(work, gpus, given.gpus_per_node, nccl=given.nccl or not machine.copies)
            if states is None or option.heads_axis == 1  # states pass between ranks in one row
        ]
        found.append((gpus, tokens, predictions, recommend(predictions, memory), memory))
    if given.json:
        print(
            json.dumps(
                [
                    {
                        **_record(machine, *world),
                        "code": _code(given, world[0], world[1], world[3]),
                        **_hybrid_record(given, states, machine, world),
                    }
                    for world in found
                ],
                indent=1,
            )
        )
    else:
        if len(found) == 1:
            _print_world(*found[0])
        else:
            _print_worlds(found)
        if states is not None:
            for gpus, tokens, _, best, _ in found:
                _print_hybrid(given, gpus, tokens, best, _predict_states(given, states, machine, gpus, tokens))
        _print_rest(given, machine, found)
    if given.timeline:
        _, _, predictions, best, _ = found[0]
        try:
            timeline.draw(best or min(predictions, key=lambda p: p.peak), given.timeline)
        except OSError as error:
            raise ValueError(f"--timeline cannot be saved: {error}") from None
        print(f"timeline: {given.timeline}", file=sys.stderr)


def _recurrent(given: argparse.Namespace) -> RecurrentWork | None:
    """The layer with a state that is asked for, of one token: its length, mask and layout are those of a world."""
    if given.recurrent is None:
        for option in ("layers", "convolution"):
            if getattr(given, option) is not None:
                raise ValueError(f"--{option} goes with --recurrent, which says what the recurrent layers are")
        return None
    kind, *sizes = given.recurrent.split(":")
    if kind not in KINDS or len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise ValueError(
            f"--recurrent is {given.recurrent!r}, but takes KIND:HEADS:D_K:D_V, where KIND is one of {', '.join(KINDS)}: delta:32:128:128"
        )
    if given.layers is not None and not re.fullmatch(r"\d+:\d+", given.layers):
        raise ValueError(f"--layers is {given.layers!r}, but takes ATTENTION:RECURRENT, such as 6:18")
    if given.convolution is not None and not re.fullmatch(r"\d+:\d+", given.convolution):
        raise ValueError(f"--convolution is {given.convolution!r}, but takes CHANNELS:WIDTH, such as 8192:4")
    if given.kv_tokens is not None:
        raise ValueError("--recurrent is for tokens that are queries and keys: leave out --kv-tokens")
    heads, d_k, d_v = map(int, sizes)
    decays, delta = KINDS[kind]
    channels, width = map(int, (given.convolution or "0:1").split(":"))
    return RecurrentWork(1, heads, d_k, d_v, decays, delta, channels, width, layout=LAYOUTS[given.layout])


def _predict_states(
    given: argparse.Namespace, states: RecurrentWork, machine: Machine, gpus: int, tokens: int
) -> RecurrentPrediction:
    work = replace(states, tokens=tokens, mask=parse_mask(given.mask, tokens))
    return predict_recurrence(machine, work, gpus, given.gpus_per_node, nccl=given.nccl)


def parse_mask(text: str, tokens: int) -> Mask:
    """The mask that `text` names, for a sequence of so many tokens. Raises ValueError if it names none."""
    word, _, size = text.partition(":")
    if text in ("causal", "full"):
        return causal() if text == "causal" else full()
    number = _tokens(size)
    if word == "window" and number is not None and number > 0:
        return sliding_window(number - 1)
    if word == "documents" and number is not None and number > 0:
        return documents(lengths=_log_normal(number, tokens))
    raise ValueError(
        f"mask is {text!r}, but must be causal, full, window:TOKENS or documents:MEAN, such as window:4096 or window:4K"
    )


def _log_normal(mean: int, tokens: int) -> list[int]:
    """Lengths of documents that fill `tokens`: log-normal, with a deviation of the logarithm of 1, the same in every run."""
    generator = np.random.default_rng(0)
    lengths = []
    left = max(1, tokens)
    while left > 0:
        lengths.append(min(left, max(1, int(generator.lognormal(np.log(mean) - 0.5)))))
        left -= lengths[-1]
    return lengths


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--rates has {text!r}, but takes NAME=VALUE, such as node_gbs=90") from None


def _budget(memory_gib: float | None, machine: Machine, work: Workload, gpus: int) -> float:
    """Bytes of a GPU for attention beyond q, k, v, out and their gradients."""
    if memory_gib is not None:
        if not 0 < memory_gib < inf:
            raise ValueError(f"memory_gib is {memory_gib}, but must be more than 0, and finite")
        return memory_gib * _GIB
    return machine.memory_gib * _GIB - held_bytes(work, gpus)


def _figures(p: Prediction) -> str:
    times = f"{p.forward * 1e3:,.1f} | {p.total * 1e3:,.1f} | {p.exposed * 1e3:,.1f}"
    rates = f"{p.tflops:.0f} | {p.alone / p.total:.2f}"
    return f"{times} | {rates} | {p.sent / _GIB:.2f} | {p.sent_between_nodes / _GIB:.2f} | {p.peak / _GIB:.2f}"


def _print_world(gpus: int, tokens: int, predictions: list[Prediction], best: Prediction | None, memory: float) -> None:
    print(f"{gpus:,} GPU{'s' * (gpus > 1)}, {tokens:,} token{'s' * (tokens > 1)}: one layer, predicted\n")
    print(f"| schedule | {_COLUMNS} |")
    print("|---" * 9 + "|")
    for p in predictions:
        mark = " (recommended)" if p is best else " (too large)" if p.peak > memory else ""
        print(f"| {p.option}{mark} | {_figures(p)} |")
    if best is None:
        print(f"\nNothing fits in {max(memory, 0) / _GIB:.1f} GiB a GPU beyond inputs, output and gradients: take more GPUs.")


def _print_worlds(found: list) -> None:
    print(f"| GPUs | tokens | schedule | {_COLUMNS} |")
    print("|---" * 11 + "|")
    for gpus, tokens, _, best, _ in found:
        row = f"{best.option} | {_figures(best)}" if best is not None else "does not fit" + " | " * 8
        print(f"| {gpus:,} | {tokens:,} | {row} |")


def _print_hybrid(given: argparse.Namespace, gpus: int, tokens: int, best: Prediction | None, states: RecurrentPrediction) -> None:
    """The recurrent layer, and the sum of the layers of both kinds."""
    columns = "forward ms | fwd+bwd ms | exposed ms | sent MiB | between nodes MiB"
    print(f"\nBeside attention, {gpus:,} GPUs, {tokens:,} tokens:\n\n| layers | {columns} |")
    print("|---" * 6 + "|")
    rows = {f"recurrent {given.recurrent}": _sums("0:1", best, states)}
    if given.layers is not None:
        attention, recurrent = given.layers.split(":")
        rows[f"{attention} of attention and {recurrent} recurrent"] = _sums(given.layers, best, states)
    for name, sums in rows.items():
        figures = "does not fit" + " | " * 4
        if sums is not None:
            times = (f"{sums[part] * 1e3:,.1f}" for part in _TIMES)
            figures = " | ".join([*times, *(f"{sums[part] / (1 << 20):,.1f}" for part in _BYTES)])
        print(f"| {name} | {figures} |")


def _hybrid_record(given: argparse.Namespace, states: RecurrentWork | None, machine: Machine, world: tuple) -> dict[str, Any]:
    """What `_print_hybrid` prints, as JSON."""
    if states is None:
        return {}
    gpus, tokens, _, best, _ = world
    found = _predict_states(given, states, machine, gpus, tokens)
    layers = {} if given.layers is None else {"layers": _sums(given.layers, best, found)}
    return {"recurrent": asdict(found), **layers}


def _sums(layers: str, best: Prediction | None, states: RecurrentPrediction) -> dict[str, float] | None:
    """Figures of so many layers of both kinds together, "6:18"; None if attention is among them and does not fit."""
    attention, recurrent = map(int, layers.split(":"))
    if attention and best is None:
        return None
    return {
        part: recurrent * getattr(states, part) + (attention * getattr(best, part) if attention else 0)
        for part in (*_TIMES, *_BYTES)
    }


def _print_rest(given: argparse.Namespace, machine: Machine, found: list) -> None:
    """What the figures rest on and, for one world, the code of the recommended schedule."""
    replaced = f", with {', '.join(given.rates)}" if given.rates else ""
    rate = f"; {machine.recurrence_tflops:g} TFLOP/s of recurrences are assumed" if given.recurrent else ""
    print(f"\n{machine.name}{replaced}: {machine.assumed}{rate}.")
    code = _code(given, found[0][0], found[0][1], found[0][3]) if len(found) == 1 else None
    if code is not None:
        print(f"\n{textwrap.indent(code, '    ')}")


def _code(given: argparse.Namespace, gpus: int, tokens: int, best: Prediction | None) -> str | None:
    """A program's lines for a recommendation; None without one."""
    if best is None:
        return None
    word, _, number = given.mask.partition(":")
    mask = {"window": f"ra.sliding_window({(_tokens(number) or 1) - 1})", "documents": "ra.documents(lengths=lengths)"}.get(
        word, f"ra.{word}()"
    )
    option = best.option
    name = "default_layout" if given.layout == "default" else given.layout
    first = "mask, " if given.layout in ("default", "balanced", "placed") else ""
    keys = ""
    schedule = "" if gpus == 1 else ", schedule=" + re.sub(r"(?=\b[a-z_]+\()", "ra.", repr(option.schedule))
    lines, group = [], ""
    if option.heads_axis > 1:
        shape = (gpus // option.heads_axis, option.heads_axis)
        lines.append("from torch.distributed.device_mesh import init_device_mesh\n")
        lines.append(f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("ring", "heads"))')
        group = ", group=mesh"
    elif option.nccl and gpus > 1:
        lines.append("group = ra.process_group()  # NCCL")
        group = ", group=group"
    lines += [f"mask = {mask}", f"layout = ra.{name}({first}{tokens}, {gpus})"]
    if given.kv_tokens is not None:
        lines.append(f"kv_layout = ra.{name}({first}{given.kv_tokens}, {gpus})")
        keys = f", kv_layout=kv_layout, q_offset={max(0, given.kv_tokens - tokens)}"
    lines.append(f"out = ra.ring_attention(q, k, v, layout=layout, mask=mask{keys}{schedule}{group})")
    return "\n".join(lines)


def _record(
    machine: Machine, gpus: int, tokens: int, predictions: list[Prediction], best: Prediction | None, memory: float
) -> dict:
    names = ("forward", "backward", "total", "exposed", "alone", "tflops", "sent", "sent_between_nodes", "peak")
    return {
        "machine": machine.name,
        "assumed": machine.assumed,
        "gpus": gpus,
        "tokens": tokens,
        "memory": memory,
        "recommended": None if best is None else str(best.option),
        "schedules": [{"schedule": str(p.option), **{name: getattr(p, name) for name in names}} for p in predictions],
    }


if __name__ == "__main__":
    main()
