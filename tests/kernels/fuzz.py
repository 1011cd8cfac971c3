"""Random problems for the kernels, one a seed: the GPU runs hundreds of them, Triton's interpreter a few by the same code."""

import contextlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

import ringattn_kernels as rk
from ringattn_kernels import dispatch, hopper
from tests.kernels import dense
from tests.kernels.rounding import errors


@dataclass(frozen=True)
class Scope:
    """What a device can run: lengths below `longest`, and the (d, dv) of each dtype."""

    device: str
    longest: int
    head_dims: dict[torch.dtype, list[tuple[int, int]]]


_SIXTEEN_BITS = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (96, 40)]
GPU = Scope("cuda", 600, {torch.bfloat16: _SIXTEEN_BITS, torch.float16: _SIXTEEN_BITS, torch.float32: [(64, 64), (24, 40)]})
INTERPRETER = Scope("cpu", 90, {torch.float16: [(16, 16), (24, 40)], torch.float32: [(16, 16), (17, 8)]})


@dataclass
class Problem:
    """Inputs, and the tiles of each launch. turn: a number that selects the kernels of the backward."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    parts: list[np.ndarray]
    softmax_scale: float
    deterministic: bool
    splits: int | None = None
    turn: int = 0

    @property
    def tables(self) -> list[rk.TileTable]:
        return [rk.TileTable(part, self.q.shape[1], self.k.shape[1]) for part in self.parts]


def problem(seed: int, scope: Scope) -> Problem:
    """Random lengths, heads, dims, strides, scales and tiles, in one launch or several."""
    random = np.random.default_rng(seed)
    dtypes = list(scope.head_dims)
    dtype = dtypes[random.integers(len(dtypes))]
    d, dv = scope.head_dims[dtype][random.integers(len(scope.head_dims[dtype]))]
    sq, sk = (int(n) for n in random.integers(1, scope.longest, 2))
    tiles = dense.random_tiles(random, sq, sk)
    if random.random() < 0.4:
        sk = sq
        cuts = np.sort(random.integers(0, sq + 1, 4))
        kinds = [dense.causal(sq), dense.full(sq, sk), dense.window(sq, sq // 4, 2), dense.documents(*np.diff(cuts, prepend=0)), []]
        tiles = kinds[random.integers(len(kinds))]
    whole, count = np.array(tiles, dtype=np.int64).reshape(-1, 6), int(random.integers(1, 4))
    b, hk, group = (int(n) for n in random.integers(1, (3, 3, 5)))
    generator = torch.Generator().manual_seed(seed)

    def tensor(rows, heads, dim, place):
        return laid_out(torch.randn(b, rows, heads, dim, generator=generator).to(scope.device, dtype), place)

    of_queries, of_keys, of_dout = ["not aligned"] * 3 if random.random() < 0.04 else random.choice(PLACES, 3)
    q, dout = tensor(sq, hk * group, d, of_queries), tensor(sq, hk * group, dv, of_dout)
    k, v = tensor(sk, hk, d, of_keys), tensor(sk, hk, dv, of_keys)
    if random.random() < 0.2:
        # as the gradient of a mean over tokens, and as one head's keys and values for all
        dout, k, v = dout[:, :1].expand_as(dout), k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)
    else:
        # keys that no query sees may be large
        unseen = ~dense.live_pairs(whole, sq, sk).any(0).to(scope.device)
        for x in (k, v):
            x[:, unseen] *= 1000
    return Problem(
        q,
        k,
        v,
        dout,
        [whole[n::count] for n in range(count)],
        float(d**-0.5 * random.choice([1, 1, 0.5, -1, 0, 300 if dtype.itemsize == 2 else 3])),
        bool(random.random() < 0.5),
        random.choice([None, 1, 2, 3, 9]),
        int(random.integers(100)),
    )


PLACES = ["tokens first", "batch last", "heads first", "among others"]


def laid_out(x: torch.Tensor, place: str) -> torch.Tensor:
    """x (b, rows, heads, dim) with its dimensions in some order in memory, or as a part of a larger tensor."""
    if place == "batch last":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if place == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if place == "among others":
        return torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]]
    if place == "not aligned":
        return torch.nn.functional.pad(x, (1, 0))[..., 1:]
    return x


def forward_launch(number: int, d: int, dv: int):
    """Replace the configuration that the Hopper forward would choose by another one for these head dims, selected by a number."""
    if hopper.obstacle or max(d, dv) > max(map(max, hopper.forward_config.CONFIGS)):
        return contextlib.nullcontext()
    found = hopper.forward_config.configs_for(d, dv)
    return mock.patch.object(hopper.forward_config, "config_for", return_value=found[number % len(found)])


def backward_kernels(p: Problem, table: rk.TileTable) -> dispatch.Kernels:
    """The chosen kernels; if these are for Hopper, any of the Hopper kernels for these head dims."""
    options = dict(deterministic=p.deterministic)
    chosen = dispatch.choose_backward(p.q, p.k, p.v, p.dout, table, **options).kernels
    found = []
    for kernels in dispatch.Kernels:
        with contextlib.suppress(ValueError):
            found.append(dispatch.choose_backward(p.q, p.k, p.v, p.dout, table, kernels, **options).kernels)
    found.remove(dispatch.Kernels.PLAIN)
    return chosen if chosen == dispatch.Kernels.PLAIN else found[p.turn % len(found)]


@contextlib.contextmanager
def memory_of_nan():
    """New memory holds NaN until it is written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(2).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(p: Problem) -> dense.Result:
    """Forward and backward, a launch for each part."""
    tables, state = p.tables, None
    with memory_of_nan():
        for n, table in enumerate(tables):
            options = dict(state=state, final=n == len(tables) - 1, splits=p.splits)
            with forward_launch(p.turn, p.q.shape[3], p.v.shape[3]):
                state = rk.forward(p.q, p.k, p.v, table, softmax_scale=p.softmax_scale, **options)
        out, row_max, row_sum = state
        queries = rk.Queries(p.q, p.dout, row_max, row_sum, rk.delta(out, p.dout))
        alone = len(tables) == 1
        dtype = p.q.dtype if alone else torch.float32
        dk, dv = torch.empty_like(p.k, dtype=dtype), torch.empty_like(p.v, dtype=dtype)
        sums = torch.empty_like(p.q, dtype=dtype) if alone else rk.QuerySums(p.q, p.softmax_scale)
        for n, table in enumerate(tables):
            kernels = backward_kernels(p, table)
            splits = p.splits if kernels in (dispatch.Kernels.PLAIN, dispatch.Kernels.HOPPER_FUSED) else None
            options = dict(dq=sums, dk=dk, dv=dv, add=n > 0, kernels=kernels, deterministic=p.deterministic, splits=splits)
            rk.backward(queries, p.k, p.v, table, softmax_scale=p.softmax_scale, **options)
        dq = sums if alone else sums.finish(p.q.dtype)
    return dense.Result(out, row_max, row_sum, dq, dk, dv)


def check(seeds: Iterable[int], scope: Scope) -> None:
    """Problems against dense attention; names all seeds whose results have errors beyond what is allowed."""
    failures = []
    for seed in seeds:
        p = problem(seed, scope)
        beyond = {name: ratio for name, ratio in ratios(p, run(p)).items() if not ratio <= 1}
        if beyond:
            failures.append(f"seed {seed}: " + ", ".join(f"{name} {ratio:.3g}" for name, ratio in beyond.items()))
    assert not failures, "errors, as multiples of what is allowed:\n" + "\n".join(failures)


def ratios(p: Problem, got: dense.Result) -> dict[str, float]:
    """Each result's error against dense attention in fp64, as a multiple of what is allowed.

    That is 2 (out) or 3 times the largest of: the error of dense attention in the inputs' dtype, what rounding costs, and 2 eps of fp32
    of the result, which approximations of exponentials and logarithms may lose alike in all weights.
    """
    live = dense.live_pairs(np.concatenate(p.parts), p.q.shape[1], p.k.shape[1]).to(p.q.device)
    empty, unseen = ~live.any(1), ~live.any(0)
    exact = dense.attention(p.q, p.k, p.v, p.dout, live, p.softmax_scale, torch.float64)
    # dense attention multiplies what no query sees by 0, which is NaN where a product was too large for fp16
    k, v = (x.masked_fill(unseen[:, None, None], 0.0) for x in (p.k, p.v))
    same = dense.attention(p.q, k, v, p.dout, live, p.softmax_scale, p.q.dtype)
    rounding = errors(p.q, k, v, p.dout, live, p.softmax_scale)
    found = {}
    for name, rtol, atol in (("row_max", 1e-5, 1e-5), ("row_sum", 2e-5, 1e-6)):
        x, z = getattr(got, name).double(), getattr(exact, name)
        # -inf - -inf is NaN
        error = (x - z).abs().masked_fill(x == z, 0.0)
        found[name] = float((error / (atol + rtol * z.abs() + 3 * getattr(rounding, name))).max())
    for name, allowed, nothing in (("out", 2, empty), ("dq", 3, empty), ("dk", 3, unseen), ("dv", 3, unseen)):
        x, y, z = (getattr(result, name) for result in (got, same, exact))
        # sums of several launches are fp32, while dense attention may be exact only because it rounds at the end
        error, of_same = ((result.to(p.q.dtype).double() - z).norm() for result in (x, y))
        limit = allowed * max(of_same, getattr(rounding, name), 2 * torch.finfo(torch.float32).eps * z.norm())
        found[name] = float(error / limit) if error else 0.0
        if (x[:, nothing] != 0).any():
            found[name] = math.inf
    return found


def launch_many(seeds: range, scope: Scope, seconds: float) -> None:
    """Run forward and backward over a small table for each seed, one after another: all end, and write what they should."""
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            results = [run(small_problem(seed, scope)) for seed in seeds]
            for seed, result in zip(seeds, results, strict=True):
                for name in ("out", "row_sum", "dq", "dk", "dv"):
                    assert getattr(result, name).isfinite().all(), (seed, name)
        except BaseException as error:
            errors.append(error)

    # a thread that waits for a hanging kernel cannot be stopped, only left behind
    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"launches of the seeds {seeds} have not ended after {seconds} seconds"
    for error in errors:
        raise error


def small_problem(seed: int, scope: Scope) -> Problem:
    """One batch, two query heads of one key/value head, in two launches."""
    random = np.random.default_rng(seed)
    dtype = next(iter(scope.head_dims))
    d, dv = scope.head_dims[dtype][seed % 2]
    sq, sk = (int(n) for n in random.integers(1, scope.longest // 2, 2))
    q, k, v, dout = (
        torch.randn(1, rows, heads, dim, device=scope.device).to(dtype)
        for rows, heads, dim in ((sq, 2, d), (sk, 1, d), (sk, 1, dv), (sq, 2, dv))
    )
    tiles = np.array(dense.random_tiles(random, sq, sk), dtype=np.int64).reshape(-1, 6)
    return Problem(q, k, v, dout, [tiles[::2], tiles[1::2]], d**-0.5, deterministic=bool(seed % 4 < 2))
