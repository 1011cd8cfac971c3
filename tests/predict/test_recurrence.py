"""Layers with states are predicted: messages are those that the layers send, and times follow from rates."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import __main__ as command_line
from ringattn.predict.machine import H200
from ringattn.predict.recurrence import DECAYS, RecurrentWork, predict_recurrence
from ringattn.transport import run_ranks

NOTHING_BESIDES = ("nccl_latency_us", "copy_latency_us")
LAYOUTS = {
    "contiguous": lambda _, *sizes: ra.contiguous(*sizes),
    "zigzag": lambda _, *sizes: ra.zigzag(*sizes),
    "balanced": ra.balanced,
}


def step(transport, work):
    """The bytes that a rank sends in a forward and a backward pass of convolution and recurrence."""
    n, layout = transport.rank, work.layout(work.mask, work.tokens, transport.size)
    s = layout.lengths[n]
    options = dict(layout=layout, mask=work.mask, group=transport)
    x = torch.randn(1, s, work.channels, dtype=torch.bfloat16, requires_grad=True)
    mixed = ra.causal_conv1d(x, torch.randn(work.channels, work.width, dtype=torch.bfloat16), **options)
    q, k, v = (mixed[..., : work.heads * d].unflatten(2, (work.heads, d)) for d in (work.d_k, work.d_k, work.d_v))
    shape = {"none": None, "number": (1, s, work.heads), "vector": (1, s, work.heads, work.d_k)}[work.decays]
    decay = None if shape is None else -torch.rand(shape)
    out = ra.linear_attention(q, k, v, decay=decay, beta=torch.rand(1, s, work.heads) if work.delta else None, **options)
    out.float().sum().backward()
    return sum(transport.bytes_sent_to)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [ra.causal(), ra.documents(lengths=[40, 3, 21])], ids=["causal", "documents"])
def test_messages_are_those_that_are_sent(mask, layout):
    for decays, delta in (("none", False), ("number", False), ("vector", False), ("number", True)):
        work = RecurrentWork(71, 2, 4, 3, decays, delta, channels=9, width=4, mask=mask, layout=LAYOUTS[layout])
        sent = run_ranks(3, lambda transport, work=work: step(transport, work))
        assert predict_recurrence(H200, work, 3, 3).sent == max(sent)


def test_bytes_of_states():
    """By hand: rank 0 sends its segment to 7 others forward, the last one its own backward: matrices (128, 128) and states, fp32."""
    work = RecurrentWork(1 << 20, 32, 128, 128, delta=True)
    assert predict_recurrence(H200, work, 8, 8).sent == 7 * 32 * 2 * 128 * 128 * 4
    across = predict_recurrence(H200, work, 8, 4)
    assert across.sent_between_nodes == 4 * 32 * 2 * 128 * 128 * 4
    assert predict_recurrence(H200, work, 1, 8).sent == 0


def test_time_without_latencies_is_work_over_rates():
    """By hand: rank 0 of a contiguous layout begins the document; others have d_k more columns, and run the forward pass again."""
    machine = H200.with_rates(dict.fromkeys(NOTHING_BESIDES, 0) | dict(nvlink_gbs=1e9, node_gbs=1e9))
    work = RecurrentWork(8000, 2, 128, 64, delta=True)
    once = 6 * 128 * 64 * 2 * 8000 / (H200.recurrence_tflops * 1e12)
    alone = predict_recurrence(machine, work, 1, 1)
    assert alone.total == pytest.approx(3.5 * once)
    assert alone.exposed == 0
    assert alone.tflops == pytest.approx(H200.recurrence_tflops)
    two = predict_recurrence(machine, work, 2, 8)
    queries = 2 * 128 * 64 * 2 * 4000 / (H200.forward_tflops * 1e12)
    assert two.forward == pytest.approx(3 * once / 2 + queries)
    assert two.backward == pytest.approx(3.5 * once / 2)
    slow = predict_recurrence(machine.with_rates(dict(copy_latency_us=1e6)), work, 2, 8)
    assert slow.forward == pytest.approx(two.forward + 1)
    assert slow.backward == pytest.approx(1 + 2.5 * once / 2, rel=1e-6)
    documents = replace(work, mask=ra.documents(lengths=[4000, 4000]))
    assert predict_recurrence(machine, documents, 2, 8).total == pytest.approx(3.5 * once / 2), "both segments begin documents"
    assert predict_recurrence(machine, replace(work, delta=False), 2, 8).backward == pytest.approx(2.5 * once / 2)


def test_slower_links_and_more_segments_take_longer():
    times = [
        predict_recurrence(
            H200, RecurrentWork(1 << 18, 32, 128, 128, delta=True, channels=8192, layout=LAYOUTS[name]), 16, per_node
        )
        for name, per_node in (("contiguous", 16), ("zigzag", 16), ("zigzag", 8))
    ]
    assert np.all(np.diff([p.exposed for p in times]) > 0)
    assert times[0].sent < times[1].sent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(decays="some"), "decays is 'some', but must be one of none, number, vector"),
        (dict(heads=0), "heads"),
        (dict(d_k=512), "d_k"),
        (dict(mask=ra.full()), "a recurrence sees all that came before"),
        (dict(layout=lambda _, *sizes: ra.striped(*sizes)), "a state passes between runs of consecutive tokens"),
        (dict(delta=1), "delta"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        predict_recurrence(H200, RecurrentWork(**dict(tokens=64, heads=2, d_k=8, d_v=8) | change), 4, 4)
    with pytest.raises(ValueError, match="multiple of the 4 GPUs"):
        predict_recurrence(H200, RecurrentWork(64, 2, 8, 8), 6, 4)
    assert DECAYS == ("none", "number", "vector")


def run(capsys, *arguments):
    command_line.main(["plan", *arguments])
    return capsys.readouterr().out


def test_the_command_adds_up_a_hybrid(capsys):
    world = ["--gpus", "4", "--tokens", "64K"]
    printed = run(capsys, *world, "--recurrent", "delta:32:128:128", "--layers", "6:18")
    row = next(line for line in printed.splitlines() if line.startswith("| recurrent"))
    total = next(line for line in printed.splitlines() if line.startswith("| 6 of attention and 18"))
    assert float(row.split("|")[3].replace(",", "")) > 0
    assert float(total.split("|")[3].replace(",", "")) > 18 * float(row.split("|")[3].replace(",", ""))
    assert "recurrence" in printed.split("h200")[-1]
    several = run(capsys, "--gpus", "2", "4", "--tokens", "4K", "--recurrent", "vector:4:64:64")
    assert several.count("| recurrent") == 2
    assert "| heads 2" in run(capsys, "--gpus", "4", "--tokens", "4K")
    assert "| heads 2" not in run(capsys, "--gpus", "4", "--tokens", "4K", "--recurrent", "vector:4:64:64"), (
        "a grid passes no states"
    )
    states = ["--layout", "contiguous", "--recurrent", "number:32:128:64", "--json"]
    plain, convolved = (
        json.loads(run(capsys, *world, *states, *more))[0]["recurrent"] for more in ([], ["--convolution", "1000:4"])
    )
    assert convolved["sent"] == plain["sent"] + 3 * 1000 * (2 + 4)
    assert convolved["forward"] > plain["forward"]
    record = json.loads(run(capsys, *world, *states, "--layers", "0:18"))[0]
    assert record["layers"]["sent"] == 18 * record["recurrent"]["sent"]
    small = [*world, "--memory-gib", "0.000001", "--recurrent", "number:32:128:64", "--layers"]
    assert "| 6 of attention and 18 recurrent | does not fit |" in run(capsys, *small, "6:18")
    assert json.loads(run(capsys, *small, "6:18", "--json"))[0]["layers"] is None
    assert "| 0 of attention and 18 recurrent | does not fit" not in run(capsys, *small, "0:18")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recurrent", "delta:32"], "--recurrent is 'delta:32', but takes KIND:HEADS:D_K:D_V"),
        (["--recurrent", "mamba:2:16:16"], "takes KIND:HEADS:D_K:D_V"),
        (["--layers", "6:18"], "--layers goes with --recurrent"),
        (["--recurrent", "delta:2:16:16", "--layers", "6"], "--layers is '6', but takes ATTENTION:RECURRENT"),
        (["--convolution", "64:4"], "--convolution goes with --recurrent"),
        (["--recurrent", "delta:2:16:16", "--convolution", "64"], "--convolution is '64', but takes CHANNELS:WIDTH"),
        (["--recurrent", "delta:2:16:16", "--convolution", "64:0"], "width is 0, but must be at least 1"),
        (["--recurrent", "delta:2:16:16", "--kv-tokens", "64"], "--recurrent is for tokens that are queries and keys"),
        (["--recurrent", "delta:2:16:16", "--mask", "window:8"], "a recurrence sees all that came before"),
        (["--recurrent", "delta:2:16:16", "--layout", "striped"], "a state passes between runs"),
    ],
)
def test_bad_recurrent_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["plan", "--gpus", "2", "--tokens", "64", *arguments])
    assert message in capsys.readouterr().err
