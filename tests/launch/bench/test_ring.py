"""The ring benchmark: its parts, and a run at toy size over gloo."""

import argparse
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import ringattn as ra

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, LAUNCH / "bench", "ring", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


@pytest.mark.thorough
def test_all_methods_are_measured(tmp_path):
    methods = ["ring", "gather", "waves-1", "ulysses", "local"]
    sizes = ["--tokens", 64, 96, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--seconds", 0]
    done = run(*sizes, "--out", tmp_path, "--trace", "--methods", *methods)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ring.json").read_text())
    assert record["world_size"] == 2
    rows = [(row["tokens"], row["method"]) for row in record["rows"]]
    assert rows == [(tokens, method) for tokens in (64, 96) for method in methods]
    for row in record["rows"]:
        # which is longer, a round on a busy machine does not show
        assert min(row["forward_backward_ms"], row["forward_ms"]) > 0
        assert row["host_ms"] > 0
        low, high = row["forward_backward_ms_quartiles"]
        assert low <= row["forward_backward_ms"] <= high
        # rank 1 sends all its K/V in both passes, and dK/dV of the half of rank 0's rows that its queries see
        shard = row["tokens"] // 2 * 2 * 2 * 8 * 4
        assert row["sent_bytes"] == (None if row["method"] in ("ulysses", "local") else shard * 5 // 2)
        assert (row["ratio"] == 1) == (row["method"] == "ulysses")
    assert list(record["differences"]) == methods[:-1]
    assert all(0 <= error < 1e-5 for error in record["differences"].values())
    assert record["differences"]["ulysses"] > 0
    assert "of local" in done.stdout
    assert {path.name for path in tmp_path.glob("trace-*")} == {f"trace-{m}-{n}.json" for m in methods for n in (64, 96)}


@pytest.mark.thorough
def test_layouts_of_packed_documents_are_compared_in_one_run(tmp_path):
    sizes = ["--tokens", 96, "--heads", 2, "--kv-heads", 1, "--head-dim", 8, "--seconds", 0]
    done = run(*sizes, "--out", tmp_path, "--mask", "documents:5")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ring.json").read_text())
    names = ["ring", "gather", "local"]
    assert [row["method"] for row in record["rows"]] == [*names, *(f"{name}@balanced" for name in names)]
    assert all(error < 1e-5 for error in record["differences"].values())
    zigzag, _, _, balanced, *_ = record["rows"]
    assert zigzag["ratio"] == 1
    assert balanced["ratio"] == pytest.approx(zigzag["forward_backward_ms"] / balanced["forward_backward_ms"])


@pytest.mark.thorough
def test_smaller_groups_of_the_same_ranks_take_turns(tmp_path):
    sizes = ["--tokens", 32, "--heads", 2, "--kv-heads", 2, "--head-dim", 8, "--seconds", 0, "--world-size", 3]
    done = run(*sizes, "--out", tmp_path, "--scaling", "--methods", "ring")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "ring_scaling.json").read_text())["rows"]
    assert [(row["ranks"], row["tokens"], row["tokens_per_gpu"]) for row in rows] == [(n, 32 * n, 32) for n in (1, 2, 3)]
    assert [row["sent_bytes"] is None for row in rows] == [True, False, False]
    rates = [row["forward_backward_tflops"] for row in rows]
    assert [row["ratio"] for row in rows] == pytest.approx([rate / rates[0] for rate in rates])
    assert all(min(row["forward_backward_ms"], row["forward_ms"]) > 0 for row in rows)


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(
    ("rows", "ratios"),
    [
        ([("ring", 4, 5), ("peer", 4, 8), ("other", 4, 10)], [0.5, 0.8, 1]),
        ([("ring", 4, 5), ("ring@balanced", 4, 10)], [1, 2]),
        ([("ring", 1, 10), ("peer", 1, 20), ("ring", 4, 5), ("peer", 4, 4)], [1, 1, 0.5, 0.2]),
    ],
    ids=["fastest-peer", "first", "scaling"],
)
def test_a_ratio_is_to_the_right_row(rows, ratios):
    from bench import ring_report

    keys = "method", "ranks", "forward_backward_tflops"
    rows = [dict(zip(keys, row)) for row in rows]
    ring_report.add_ratios(rows, ("peer", "other"))
    assert [row["ratio"] for row in rows] == ratios


@pytest.mark.usefixtures("launch")
def test_graphs_need_gpus():
    from bench.shared.cases import RingCase
    from bench.shared.methods import ours

    with pytest.raises(ValueError, match=r"ring\+graph"):
        ours("ring+graph", RingCase(64, 2, 2, 8, "cpu", ra.causal(), None), ra.zigzag(64, 2))


@pytest.mark.usefixtures("launch")
def test_documents_of_skewed_lengths_fill_the_sequence():
    from bench.shared.cases import parse_mask

    dense = parse_mask("documents:7", 1000).dense(1000)
    starts = (dense.sum(1) == 1).nonzero().flatten().tolist()
    lengths = [b - a for a, b in pairwise([*starts, 1000])]
    assert len(lengths) == 7
    assert lengths[0] > 6 * lengths[-1]
    assert dense.sum() == sum(n * (n + 1) // 2 for n in lengths)
    assert parse_mask("window:10", 64) == ra.sliding_window(9, 0)
    with pytest.raises(ValueError, match="cuasal"):
        parse_mask("cuasal", 64)


@pytest.mark.usefixtures("launch")
def test_a_transfer_is_exposed_while_nothing_computes():
    from bench import ring_trace

    def event(name, begin, end, cat="kernel"):
        return {"name": name, "cat": cat, "ts": begin, "dur": end - begin}

    events = [
        event("ncclDevKernel_SendRecv", 0, 10),
        event("Memcpy PtoP (Device -> Device)", 5, 20, "gpu_memcpy"),
        event("hopper_forward_kernel", 4, 8),
        event("hopper_forward_kernel", 15, 30),
        {"name": "launch", "cat": "cuda_runtime", "ts": 0, "dur": 100},
    ]
    moving, busy = ring_trace.device_intervals(events)
    assert moving == [(0, 20)]
    assert busy == [(4, 8), (15, 30)]
    assert ring_trace.overlap(moving, busy) == 9


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(
    ("first", "seconds", "device", "rounds"),
    [
        ([(0.1, 0.4, 0.01)] * 5, 8, "cuda", 3),
        ([(0.001, 0.004, 0.002)], 8, "cuda", 10),
        ([(8.0, 8.5, 8.4), (9.0, 9.5, 9.0)], 1, "cuda", 2),
        ([(5.0, 20.0, 4.0)], 8, "cuda", 0),
        ([(5.0, 20.0, 20.0)], 8, "cpu", 0),
        ([(0.1, 0.4, 0.01)], None, "cuda", 0),
    ],
    ids=["short", "shorter", "compiles", "long", "long-on-a-cpu", "memory-alone"],
)
def test_a_round_is_repeated_unless_its_gpus_took_long(first, seconds, device, rounds, monkeypatch):
    from bench import ring_measure

    monkeypatch.setattr(ring_measure, "slowest", lambda values, device: values)
    assert ring_measure.rounds_after([ring_measure.Times(*one) for one in first], seconds, device) == rounds


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("ahead", [True, False])
def test_one_by_one_a_turn_begins_on_an_idle_gpu(ahead, monkeypatch):
    from bench import ring_measure

    busy = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 2.0)
    monkeypatch.setattr(ring_measure.torch.cuda, "_sleep", busy.append)
    monkeypatch.setattr(ring_measure.torch.cuda, "Event", lambda **options: event)
    monkeypatch.setattr(ring_measure.torch.cuda, "synchronize", lambda: None)
    times = ring_measure.once(SimpleNamespace(forward=lambda: None, backward=lambda: None), "cuda", ahead)
    assert len(busy) == ahead
    assert times.forward == times.both == 2e-3


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(("ahead", "counted"), [(True, 2), (False, 10)])
def test_one_by_one_a_turn_is_five_calls_and_the_first_round_does_not_count(ahead, counted, monkeypatch):
    from bench import ring_measure

    calls = []
    method = SimpleNamespace(forward=lambda: calls.append(1), backward=lambda: None, results_bytes=0)
    case = SimpleNamespace(device="cpu", ranks=SimpleNamespace(size=1), tokens=8, forward_flop=1.0)
    monkeypatch.setattr(ring_measure.Entry, "make", lambda self: method)
    monkeypatch.setattr(ring_measure, "count_sent", lambda method: nullcontext([]))
    monkeypatch.setattr(ring_measure, "slowest", lambda values, device: values)
    monkeypatch.setattr(ring_measure.dist, "barrier", lambda: None)
    (row,) = ring_measure.measure([ring_measure.Entry("ours", case, ahead=ahead)], 0.0)
    assert row["rounds"] == counted and len(calls) == 1 + 3 * (1 if ahead else 5)


ERRORS = {
    "method": (["--methods", "rng"], "method 'rng' is not one of default, ring, gather"),
    "number": (["--methods", "waves-x"], "method 'waves-x': only waves and double_ring take a number, such as waves-2"),
    "width": (["--methods", "waves-0"], "width is 0, but must be at least 1"),
    "layout": (["--methods", "ring@tiled"], "layout 'tiled' of method 'ring@tiled' is not one of balanced, placed, zigzag"),
    "transport": (["--methods", "ring+ipc"], "method 'ring+ipc' has the transport 'ipc', but must have none"),
    "GPUs": (["--methods", "ring+symmetric"], "method 'ring+symmetric' needs GPUs"),
    "peer's mask": (["--methods", "ulysses", "--mask", "full"], "method 'ulysses' is measured with a causal mask only"),
    "mask": (["--mask", "documents:x"], "mask is 'documents:x', but must be causal, full, window:TOKENS or documents:NUMBER"),
    "window": (["--mask", "window:0"], "mask is 'window:0', but must be causal"),
    "mask's number": (["--mask", "causal:3"], "mask is 'causal:3', but must be causal"),
    "tokens": (["--tokens", "64", "0"], "tokens is 0, but must be at least 1"),
    "ranks": (["--world-size", "0"], "world_size is 0, but must be at least 1"),
    "heads": (["--heads", "3", "--kv-heads", "2"], "kv_heads is 2, which does not divide the 3 heads"),
}


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(("method", "package"), [("ulysses+flash4", "flash_attn.cute"), ("ring_flash_attn", "ring_flash_attn")])
def test_a_peer_that_is_not_installed_is_refused(method, package, monkeypatch):
    from bench.shared import methods, peers

    monkeypatch.setattr(methods, "is_installed", lambda package: False)
    with pytest.raises(ValueError, match=f"method '{re.escape(method)}' needs the package {package}, which is not installed"):
        methods.check_method(method, "cuda", "causal")
    assert peers.is_installed("torch.nn") and not peers.is_installed("torch.no_such") and not peers.is_installed("no_such.package")


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize(("given", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_arguments_are_refused_before_any_rank_starts(given, message, monkeypatch):
    from bench import ring

    parser = argparse.ArgumentParser()
    ring.add_arguments(parser)
    monkeypatch.setattr(ring, "start_ranks", lambda *args: pytest.fail("a rank was started"))
    with pytest.raises(SystemExit, match=re.escape(f"bench ring: {message}")):
        ring.main(parser.parse_args(["--device", "cpu", *given]))


@pytest.mark.usefixtures("launch")
def test_a_line_is_fitted_to_peak_memory():
    from bench import ring_report

    rows = [{"method": "ring", "tokens_per_gpu": n, "peak_bytes_beyond_inputs": 7 * n + 5} for n in (1, 2, 4)]
    fit = ring_report.memory_fits(rows)["ring"]
    assert fit["bytes_per_token"] == pytest.approx(7)
    assert fit["bytes"] == pytest.approx(5)
    assert fit["r2"] == pytest.approx(1)
    # a single size gives no line
    assert ring_report.memory_fits([{**row, "tokens_per_gpu": 4} for row in rows]) == {}
