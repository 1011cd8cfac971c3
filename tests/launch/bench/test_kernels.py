"""The parts of `bench kernels` that need no GPU: its cases and their operations, its table and its picture."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch.nn.attention import SDPBackend

import ringattn as ra
from ringattn.geometry.plan import live_pairs

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(LAUNCH))


def module(name):
    return importlib.import_module(f"bench.{name}")


def case(kind="Dense", tokens=96, **options):
    make = getattr(module("kernels_cases"), f"{kind}Case")
    return make(tokens, **{"heads": 4, "kv_heads": 2, "head_dim": 16, "v_dim": 16, **options})


SMALL = {
    "causal": ({}, lambda: ra.causal().dense(96)),
    "full": ({"causal": False}, lambda: ra.full().dense(96)),
    "packed": ({"kind": "Packed", "tokens": 197}, lambda: ra.documents(case("Packed", 197).documents).dense(197)),
    "zigzag": ({"kind": "Zigzag", "tokens": 10}, lambda: ra.causal().dense(80)[ra.zigzag(80, 8).positions(0)]),
}


@pytest.mark.parametrize(("options", "live"), SMALL.values(), ids=SMALL)
def test_operations_are_those_of_the_live_pairs(options, live):
    one = case(**options)
    pairs = int(live().sum())
    assert live_pairs(one.tiles) == pairs
    assert one.flop("forward") == 4 * pairs * 4 * 16
    assert one.flop("backward") == 2.5 * one.flop("forward")
    assert replace(one, v_dim=8).flop("backward") == 2 * pairs * 4 * (3 * 16 + 2 * 8)
    covered = torch.zeros(one.tokens, one.keys, dtype=torch.bool)
    for q_begin, q_end, k_begin, k_end, lo, hi in one.tiles.tiles.tolist():
        i, j = torch.arange(q_begin, q_end)[:, None], torch.arange(k_begin, k_end)
        covered[q_begin:q_end, k_begin:k_end] |= (lo <= i - j) & (i - j <= hi)
    assert int(covered.sum()) == pairs


def test_the_table_holds_the_cases_to_measure():
    cases = module("kernels_cases")
    names = [one.name for one in cases.table()]
    assert len(set(names)) == len(names)
    for tokens in (8192, 16384, 32768, 65536):
        for head_dim in (64, 128):
            for heads in ("32:32", "32:8"):
                assert {f"dense {tokens} D{head_dim} {heads} {mask}" for mask in ("causal", "full")} <= set(names)
    assert {f"dense 16384 D{dims} 32:8 causal" for dims in ("96", "256", "192/128")} <= set(names)
    zigzag, packed = cases.table(("zigzag", "packed"))
    assert (zigzag.tokens, zigzag.keys, packed.tokens) == (16384, 131072, 65536)
    assert len(packed.documents) == 32
    assert sum(packed.documents) == 65536
    assert min(packed.documents) > 0
    assert max(packed.documents) > 8 * min(packed.documents), "short and long ones are mixed"
    # an eighth of a causal call
    assert live_pairs(zigzag.tiles) == pytest.approx(131072**2 / 16, rel=1e-4)
    dense = zigzag.dense_alike
    assert dense.tokens % 128 == 0
    assert dense.flop("forward") == pytest.approx(zigzag.flop("forward"), rel=5e-3)


def test_cases_can_be_chosen():
    table = module("kernels_cases").table
    chosen = table(["dense"], [512], ["192/128"], 8, [2], ["full"])
    assert [one.name for one in chosen] == ["dense 512 D192/128 8:2 full"]
    assert {one.head_dim for one in table(["dense"], head_dims=["96"])} == {96}
    assert {one.tokens for one in table(["dense"], head_dims=["96"])} == set(module("kernels_cases").SEQUENCES)
    with pytest.raises(ValueError, match="a head dim is '1/2/3'"):
        table(["dense"], head_dims=["1/2/3"])


def test_the_quick_selection_is_little_work():
    cases = module("kernels_cases").quick()
    assert {one.kind for one in cases} == {"dense", "zigzag", "packed"}
    assert len({(one.head_dim, one.v_dim) for one in cases}) <= 2, "every head dim is compiled anew"
    # two contestants with eleven calls each at 300 TFLOP/s take a third of the 90 seconds; the rest is for compiling
    assert 2 * 11 * sum(one.flop("forward") + one.flop("backward") for one in cases) / 3e14 < 30


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_difference_of_a_peer_from_ours_is_measured(mask):
    one = case(causal=mask == "causal")
    inputs = [torch.randn(1, 96, heads, 16) for heads in (4, 2, 2, 4)]
    passes = module("kernels_peers").sdpa(one, inputs, SDPBackend.MATH)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = ra.reference.attention(*leaves, mask={"causal": ra.causal(), "full": ra.full()}[mask])
    difference = module("kernels").difference
    assert difference(out, passes.forward()) < 1e-6
    assert difference(out, out[0]) == 0
    assert difference(out, passes.forward() * 1.03) == pytest.approx(0.03, rel=1e-3)
    for got, wanted in zip(passes.backward(), torch.autograd.grad(out, leaves, inputs[3])):
        assert difference(wanted, got) < 1e-6


def record():
    def rate(tflops):
        return {"ms": 1.0, "tflops": tflops, "low": tflops - 4, "high": tflops + 2}

    def row(name, **rates):
        rates = {"matmul": (800, 800), **rates}
        both = {n.replace("_", " "): {d: rate(x) for d, x in zip(("forward", "backward"), r) if x} for n, r in rates.items()}
        kernels = {
            "forward": "hopper: sm_90",
            "backward": "plain: head_dim is 96",
            "backward deterministic": "hopper_ordered: sm_90",
        }
        return {"case": name, "kernels": kernels, "rates": both, "missing": {"flash2": "RuntimeError: no"} if name == "two" else {}}

    rows = [row("one", ringattn=(600, 400), cudnn=(500, 500)), row("two", ringattn=(700, 560), ringattn_deterministic=(None, 480))]
    return {"device": "GPU", "torch": "2", "triton": "3", "cudnn": 9, "command": "python", "rows": rows}


def test_figures_are_shown_and_drawn_from_a_file(tmp_path, capsys):
    bench = module("kernels")
    (tmp_path / "figures.json").write_text(json.dumps(record()))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    picture = tmp_path / "deep" / "kernels.png"
    bench.main(parser.parse_args(["--from", str(tmp_path / "figures.json"), "--plot", str(picture)]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == (
        "| one | hopper / plain / hopper_ordered | 600 ± 3 / 400 ± 3 | 0.75 / 0.50 | cudnn 500 ± 3 / 500 ± 3 | 1.20 / 0.80 |"
    )
    assert lines[-1] == (
        "| two | hopper / plain / hopper_ordered | 700 ± 3 / 560 ± 3 | 0.88 / 0.70 "
        "| ringattn deterministic - / 480 ± 3; flash2: not for this |  |"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert parser.parse_args(["--plot"]).plot == bench.IMAGE


def test_a_whole_run_with_stand_ins_for_everything_that_needs_a_gpu(monkeypatch, tmp_path, capsys):
    bench, peers, timing = module("kernels"), module("kernels_peers"), module("shared.timing")
    passes = peers.Passes
    out = torch.ones(1, 4, 2, 8)

    def refuse(case, inputs):
        raise RuntimeError("No available kernel\nat all")

    def not_here(case, inputs):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    def spreads(functions, repeats):
        return {name: timing.Spread(1.0, 2.0, 4.0) for name in functions}

    cases = [case("Dense", 512), case("Zigzag", 64), case("Packed", 197)]
    monkeypatch.setattr(bench, "table", lambda *_: cases)
    monkeypatch.setattr(bench, "spreads", spreads)
    monkeypatch.setattr(peers, "tensors", lambda case: ())
    monkeypatch.setattr(peers, "ours", lambda case, inputs, **mode: passes(lambda: (out,), lambda: None))
    monkeypatch.setattr(peers, "choices", lambda case, inputs: {"forward": "plain: why", "backward": "plain: why"})
    monkeypatch.setattr(peers, "matmul", lambda: passes(lambda: None, lambda: None))
    right, wrong = (lambda case, inputs, x=x: passes(lambda: x.transpose(1, 2), lambda: None) for x in (out, out * 1.1))
    monkeypatch.setattr(peers, "PEERS", {"cudnn": right, "flash2": refuse, "flash4": not_here, "flex": wrong})
    for name, value in {"is_available": True, "get_device_name": "GPU", "empty_cache": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    bench.main(parser.parse_args(["--peers", "cudnn", "flash2", "flash4", "flex", "--json", str(tmp_path / "a" / "figures.json")]))
    rows = json.loads((tmp_path / "a" / "figures.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["dense", "zigzag", "packed"]
    assert set(rows[0]["rates"]) == {"matmul", "ringattn", "ringattn deterministic", "cudnn"}
    assert rows[0]["missing"] == {
        "flash2": "RuntimeError: No available kernel",
        "flash4": "ModuleNotFoundError: No module named 'flash_attn'",
        "flex": "its result differs from ours by 10.0%",
    }
    assert set(rows[0]["rates"]["ringattn deterministic"]) == {"backward"}
    assert rows[0]["rates"]["ringattn"]["forward"]["tflops"] == cases[0].flop("forward") / 2.0 / 1e9
    assert rows[1]["rates"]["ringattn, dense"]["backward"]["tflops"] == cases[1].dense_alike.flop("backward") / 2.0 / 1e9
    assert "not for this" in capsys.readouterr().out
    figures, picture = tmp_path / "forward.json", tmp_path / "forward.png"
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", "sm80")
    bench.main(parser.parse_args(["--directions", "forward", "--peers", "cudnn", "--json", str(figures), "--plot", str(picture)]))
    record = json.loads(figures.read_text())
    assert record["device"] == "GPU as sm80"
    rates = record["rows"][0]["rates"]
    assert {name: list(rate) for name, rate in rates.items()} == {
        "matmul": ["forward"], "ringattn": ["forward"], "ringattn deterministic": [], "cudnn": ["forward"]
    }  # fmt: skip
    assert capsys.readouterr().out.endswith(" / - | 1.00 |\n")
    assert picture.exists()


def test_the_kernels_of_every_mode_are_named(monkeypatch):
    peers = module("kernels_peers")
    monkeypatch.setattr(peers.dispatch, "architecture", lambda device: "sm_90")
    one = case(tokens=4096, heads=8, kv_heads=8, head_dim=128, v_dim=128)
    inputs = torch.empty(4, 1, 4096, 8, 128, dtype=torch.bfloat16).unbind()
    assert list(peers.choices(one, inputs).items()) == [
        ("forward", "hopper: sm_90"),
        ("backward", "hopper_fused: sm_90"),
        ("backward deterministic", "hopper_ordered: sm_90"),
    ]


def test_without_a_gpu_it_says_so(monkeypatch):
    bench = module("kernels")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="measures on a GPU"):
        bench.main(parser.parse_args(["--quick"]))


def test_rates_come_from_the_median_and_the_quartiles():
    timing = module("shared.timing")
    spread = timing.spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.lower, spread.median, spread.upper) == (2.0, 3.0, 4.0)
    rated = module("kernels").rated(timing.Spread(2.0, 4.0, 5.0), 2e12)
    assert rated == {"ms": 4.0, "tflops": 500.0, "low": 400.0, "high": 1000.0}


def test_peers_of_a_case():
    bench = module("kernels")
    assert bench.peers_of(case("Zigzag"), ["flex"], False) == []
    assert bench.peers_of(case(), None, True) == ["cudnn"]
    assert "flex" in bench.peers_of(case("Packed"), None, False)
    assert bench.peers_of(case("Packed"), ["flash2"], True) == ["flash2"]
