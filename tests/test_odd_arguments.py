"""Odd arguments: every public function takes each odd value rightly, or raises ValueError; a TypeError never comes from inside.

A value is taken only if the argument's annotation names its kind. What is taken must serve: the result is then used, and an integer of
NumPy gives the same result as Python's.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn import planner, warmup
from ringattn.integrations import deepspeed, huggingface
from ringattn.predict.machine import H200, Machine
from ringattn.predict.simulation import Option, Workload
from ringattn.training import causal_lm, data, loss, tiled

LAYOUT, MASK = ra.zigzag(6, 1), ra.causal()
PLAN = ra.make_plan(ra.zigzag(6, 2), MASK)
TOKENS = torch.zeros(1, 6, dtype=torch.int64)
WORK = Workload(64, 2, 2, 8, MASK)
REDUCTION = loss.summed()

# name: the value's maker, and the words of an annotation that names its kind
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "None Any"),
    "half": (lambda: 1.5, "float"),
    "True": (lambda: True, "bool"),
    "NumPy's 1": (lambda: np.int64(1), "int float"),
    "NumPy's half": (lambda: np.float64(1.5), "float"),
    "NumPy's True": (lambda: np.bool_(True), ""),
    "0-D array": (lambda: np.array(3), "Tensor ndarray"),
    "1-D array": (lambda: np.arange(3), "Tensor ndarray Sequence Iterable"),
    "3-D array": (lambda: np.zeros((1, 2, 3)), "Tensor ndarray"),
    "array of objects": (lambda: np.array([None, "a"]), "Tensor ndarray Iterable"),
    "2**63": (lambda: 2**63, "int float"),
    "2**64": (lambda: 2**64, "int float"),
    "a list of 2**63": (lambda: [2**63], "Sequence Iterable"),
    "-1": (lambda: -1, "int float"),
    "nan": (lambda: float("nan"), "float"),
    "inf": (lambda: float("inf"), "float"),
    "complex": (lambda: 1j, ""),
    "text": (lambda: "odd", "str"),
    "no text": (lambda: "", "str"),
    "bytes": (lambda: b"odd", ""),
    "empty list": (list, "Sequence Iterable tuple"),
    "list of text": (lambda: ["a", "b"], "Sequence Iterable"),
    "list of lists": (lambda: [[], [1]], "Sequence Iterable"),
    "list of None": (lambda: [None], "Sequence Iterable"),
    "dict": (dict, "Mapping Iterable"),
    "set": (lambda: {1, 2}, "Iterable"),
    "generator": (lambda: (i for i in range(3)), "Iterable"),
    "object": (object, "Any"),
    "function": (lambda: print, "Callable"),
    "class": (lambda: int, "Callable"),
    "slice": (lambda: slice(3), ""),
    "0-D tensor": (lambda: torch.tensor(3), "Tensor"),
    "meta tensor": (lambda: torch.zeros(3, dtype=torch.int64, device="meta"), "Tensor"),
    "4-D meta tensor": (lambda: torch.zeros(1, 6, 2, 8, device="meta"), "Tensor"),
    "bfloat16 tensor": (lambda: torch.ones(3, dtype=torch.bfloat16), "Tensor"),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), "Tensor"),
    "complex tensor": (lambda: torch.ones(3, dtype=torch.complex64), "Tensor"),
    "uint64 tensor": (lambda: torch.tensor([2**63], dtype=torch.uint64), "Tensor Sequence Iterable"),
    "tensor that requires grad": (lambda: torch.ones(3, requires_grad=True), "Tensor"),
    "list of meta tensors": (lambda: [torch.zeros((), device="meta")], "Sequence Iterable"),
}


@functools.wraps(ra.warm)
def warm(*args, **options):
    """`ra.warm` for short sequences, without the seconds that it took."""
    with mock.patch.object(warmup, "_SHAPES", ((6, 1, 1),)):
        ra.warm(*args, **options)


def x(*shape):
    return torch.zeros(shape or (1, 6, 2, 8))


def partial():
    return ra.attend(x(), x(), x())


class Attention(torch.nn.Module):
    def forward(self, q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


class MLP(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def span_in_layout(start: int = 0, length: int = 6, stride: int = 1) -> ra.Layout:
    return ra.Layout(6, ((ra.Span(start, length, stride),),))


def of_lengths(lengths: Sequence[int] | torch.Tensor) -> ra.Mask:
    return ra.documents(lengths=lengths)


def with_tokens(input_ids: torch.Tensor) -> data.Batch:
    return data.shard_batch({"input_ids": input_ids}, LAYOUT, 0)


def with_labels(labels: torch.Tensor | None) -> data.Batch:
    return data.shard_batch({"input_ids": TOKENS, "labels": labels}, LAYOUT, 0)


def with_positions(position_ids: torch.Tensor | None) -> data.Batch:
    return data.shard_batch({"input_ids": TOKENS, "position_ids": position_ids}, LAYOUT, 0)


def with_mask(attention_mask: torch.Tensor | None) -> data.Batch:
    return data.shard_batch({"input_ids": TOKENS, "attention_mask": attention_mask}, LAYOUT, 0)


def with_bounds(cu_seq_lens_q: Sequence[int] | torch.Tensor | None) -> data.Batch:
    return data.shard_batch({"input_ids": TOKENS, "cu_seq_lens_q": cu_seq_lens_q}, LAYOUT, 0)


def count_of(labels: torch.Tensor) -> torch.Tensor:
    return loss.count_tokens(labels)


def of_score(score: ra.ScoreMod | None) -> torch.Tensor:
    return ra.reference.attention(x(), x(), x(), score=score)


def ring_attention(layout: ra.Layout | None, mask: ra.Mask | None, softmax_scale: float | None, score: ra.ScoreMod | None) -> Any:
    parallel = object.__new__(deepspeed.DeepSpeedParallel)
    parallel.ring = None
    return deepspeed.RingAttention(parallel, layout=layout, mask=mask, softmax_scale=softmax_scale, score=score)


def cache(**options) -> ra.PagedCache:
    return ra.PagedCache(pages=2, kv_heads=2, head_dim=8, **options)


CACHE = cache()
CACHED = CACHE.extend([CACHE.add()], 6)


def extended(tokens: int) -> int:
    found = cache()
    return found.extend([found.add()], tokens).sequences[0].length


def truncated(length: int) -> int:
    found = cache()
    (sequence,) = found.extend([found.add()], 6).sequences
    found.truncate(sequence, length)
    return sequence.length


def evicted(before: int) -> tuple[int, ...]:
    found = cache()
    found.evict(found.extend([found.add()], 6).sequences[0], before)
    return found.free_pages


def of_sequences(sequences: Sequence[ra.CachedSequence]) -> ra.CacheBatch:
    return cache().extend(sequences, 1)


def extended_into(into: ra.CacheBatch | None) -> int:
    found = cache()
    return found.extend([found.add()], 1, into).tokens


def with_rate(hbm_gbs: float) -> Machine:
    return H200.with_rates({"hbm_gbs": hbm_gbs})


# name: a function, and its arguments that have no default or that make a call shorter
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Callable[[], Any]]]] = {
    "Layout": (ra.Layout, {"seq_len": lambda: 6, "spans": lambda: ((ra.Span(0, 6),),)}),
    "Layout.positions": (LAYOUT.positions, {"rank": lambda: 0}),
    "Layout.work": (LAYOUT.work, {"mask": lambda: MASK}),
    "Layout.balance": (LAYOUT.balance, {"mask": lambda: MASK}),
    "Mask.dense": (MASK.dense, {"seq_len": lambda: 4}),
    "Mask.regions": (MASK.regions, {"seq_len": lambda: 4}),
    "Mask.check_length": (MASK.check_length, {"seq_len": lambda: 4}),
    "Mask.picture": (MASK.picture, {}),
    "Mask.__or__": (MASK.__or__, {"other": lambda: MASK}),
    "Mask.__and__": (MASK.__and__, {"other": lambda: MASK}),
    "manual_seed": (ra.manual_seed, {"seed": lambda: 3, "rank": lambda: 1, "replica": lambda: 0, "device": lambda: "cpu"}),
    "warm": (warm, {"head_dims": lambda: [4], "dtype": lambda: torch.float32, "device": lambda: "cpu"}),
    "PagedCache": (ra.PagedCache, {"pages": lambda: 2, "kv_heads": lambda: 2, "head_dim": lambda: 8}),
    "PagedCache.extend": (extended, {"tokens": lambda: 6}),
    "PagedCache.extend of sequences": (of_sequences, {"sequences": lambda: [CACHED.sequences[0]]}),
    "PagedCache.extend into": (extended_into, {"into": lambda: None}),
    "PagedCache.truncate": (truncated, {"length": lambda: 6}),
    "PagedCache.evict": (evicted, {"before": lambda: 6}),
    "PagedCache.fork": (CACHE.fork, {"sequence": CACHE.add}),
    "PagedCache.free": (CACHE.free, {"sequence": CACHE.add}),
    "PagedCache.append": (CACHE.append, {"batch": lambda: CACHED, "k": x, "v": x}),
    "PagedCache.fill": (CACHE.fill, {"batch": lambda: CACHED, "k": x, "v": x, "layout": lambda: LAYOUT}),
    "Plan.tiles": (PLAN.tiles, {"rank": lambda: 0, "owner": lambda: 1}),
    "Plan.needs": (PLAN.needs, {"rank": lambda: 0, "owner": lambda: 1}),
    "Plan.pairs_of": (PLAN.pairs_of, {"rank": lambda: 0, "owner": lambda: 1}),
    "Plan.pairs_by_owner": (PLAN.pairs_by_owner, {"rank": lambda: 0}),
    "Plan.needed_by_owner": (PLAN.needed_by_owner, {"rank": lambda: 0}),
    "Span": (span_in_layout, {}),
    "alibi_slopes": (ra.alibi_slopes, {"h": lambda: 2}),
    "attend": (ra.attend, {"q": x, "k": x, "v": x}),
    "balanced": (ra.balanced, {"mask": lambda: MASK, "seq_len": lambda: 6, "world_size": lambda: 2}),
    "bigbird": (ra.bigbird, {"seq_len": lambda: 64, "block_size": lambda: 8}),
    "block_sparse": (ra.block_sparse, {"block_mask": lambda: [[True]], "block_size": lambda: 4}),
    "buckets": (ra.buckets, {"edges": lambda: [-1, 1]}),
    "causal": (ra.causal, {}),
    "checkpoint_layers": (ra.checkpoint_layers, {"layers": lambda: [torch.nn.Linear(2, 2)]}),
    "contiguous": (ra.contiguous, {"seq_len": lambda: 6, "world_size": lambda: 2}),
    "decode": (ra.decode, {"q": x, "cache": lambda: CACHE, "batch": lambda: CACHED}),
    "default_layout": (ra.default_layout, {"mask": lambda: MASK, "seq_len": lambda: 6, "world_size": lambda: 2}),
    "default_schedule": (ra.default_schedule, {"plan": lambda: PLAN}),
    "causal_conv1d": (ra.causal_conv1d, {"x": lambda: x(1, 6, 3), "weight": lambda: x(3, 4)}),
    "dilated_window": (ra.dilated_window, {"window": lambda: 2, "dilation": lambda: 2}),
    "documents": (ra.documents, {"cu_seqlens": lambda: [0, 3]}),
    "documents of lengths": (of_lengths, {"lengths": lambda: [3]}),
    "double_ring": (ra.double_ring, {}),
    "finish": (ra.finish, {"part": partial}),
    "fla_kernels": (ra.fla_kernels, {}),
    "full": (ra.full, {}),
    "gather": (ra.gather, {}),
    "global_tokens": (ra.global_tokens, {"n_or_positions": lambda: 2}),
    "hybrid": (ra.hybrid, {"mesh": lambda: None}),
    "favor_projection": (ra.favor_projection, {"head_dim": lambda: 8, "features": lambda: 12}),
    "favor_features": (ra.favor_features, {"x": x, "projection": lambda: torch.ones(12, 8)}),
    "linear_attention": (ra.linear_attention, {"q": x, "k": x, "v": x}),
    "make_plan": (ra.make_plan, {"layout": lambda: LAYOUT, "mask": lambda: MASK}),
    "merge": (ra.merge, {"a": partial, "b": partial}),
    "pass_q": (ra.pass_q, {}),
    "placed": (ra.placed, {"mask": lambda: MASK, "seq_len": lambda: 6, "world_size": lambda: 2}),
    "prefill": (ra.prefill, {"q": x, "k": x, "v": x, "cache": lambda: CACHE, "batch": lambda: CACHED, "layout": lambda: LAYOUT}),
    "prefix": (ra.prefix, {"n": lambda: 2}),
    "process_group": (ra.process_group, {}),
    "relative_bias": (ra.relative_bias, {"table": lambda: x(2, 32), "buckets": lambda: ra.t5_buckets(bidirectional=False)}),
    "replace_attention": (ra.replace_attention, {"model": Attention}),
    "prepare": (ra.prepare, {"layout": lambda: LAYOUT, "kv_layout": lambda: LAYOUT, "like": lambda: (x(), x(), x())}),
    "ring": (ra.ring, {}),
    "ring_attention": (ra.ring_attention, {"q": x, "k": x, "v": x}),
    "score": (ra.score, {}),
    "score of a call": (of_score, {"score": ra.score}),
    "shard": (ra.shard, {"x": lambda: TOKENS, "layout": lambda: LAYOUT, "rank": lambda: 0}),
    "sliding_window": (ra.sliding_window, {"left": lambda: 2}),
    "striped": (ra.striped, {"seq_len": lambda: 6, "world_size": lambda: 2}),
    "symmetric": (ra.symmetric, {}),
    "t5_buckets": (ra.t5_buckets, {"bidirectional": lambda: False}),
    "torch_kernels": (ra.torch_kernels, {}),
    "unshard": (ra.unshard, {"x_local": lambda: TOKENS, "layout": lambda: LAYOUT}),
    "verify": (ra.verify, {"model": lambda: torch.nn.Linear(2, 2), "batch": lambda: {"input_ids": TOKENS}}),
    "waves": (ra.waves, {}),
    "zigzag": (ra.zigzag, {"seq_len": lambda: 6, "world_size": lambda: 2}),
    # training
    "CausalLMLoss": (causal_lm.CausalLMLoss, {"model": lambda: torch.nn.Linear(2, 2)}),
    "fused_token_loss": (
        causal_lm.fused_token_loss,
        {"hidden": lambda: x(1, 6, 8), "weight": lambda: x(4, 8), "labels": lambda: TOKENS},
    ),
    "shift_labels": (causal_lm.shift_labels, {"tokens": lambda: TOKENS}),
    "sum_gradients": (causal_lm.sum_gradients, {"parameters": lambda: [torch.nn.Parameter(x(2))]}),
    "token_loss": (causal_lm.token_loss, {"hidden": lambda: x(1, 6, 8), "weight": lambda: x(4, 8), "labels": lambda: TOKENS}),
    "pack": (data.pack, {"tokens": lambda: [[1, 2]]}),
    "shard_batch": (data.shard_batch, {"batch": lambda: {"input_ids": TOKENS}, "layout": lambda: LAYOUT, "rank": lambda: 0}),
    "shard_batch with tokens": (with_tokens, {"input_ids": lambda: TOKENS}),
    "shard_batch with labels": (with_labels, {"labels": lambda: TOKENS}),
    "shard_batch with positions": (with_positions, {"position_ids": lambda: TOKENS}),
    "shard_batch with a mask": (with_mask, {"attention_mask": lambda: None}),
    "shard_batch with bounds": (with_bounds, {"cu_seq_lens_q": lambda: None}),
    "averaged": (loss.averaged, {}),
    "count_tokens": (count_of, {"labels": lambda: TOKENS}),
    "deepspeed": (loss.deepspeed, {"data_parallel": lambda: 2}),
    "mean_loss": (
        loss.mean_loss,
        {"summed_loss": lambda: torch.tensor(1.0), "labels": lambda: TOKENS, "reduction": lambda: REDUCTION},
    ),
    "Reduction": (loss.Reduction, {"divisor": lambda: 2}),
    "tile_modules": (tiled.tile_modules, {"model": lambda: torch.nn.Sequential(MLP()), "rows": lambda: 2}),
    "tiled": (tiled.tiled, {"function": lambda: torch.nn.Identity(), "x": lambda: x(1, 6, 8), "rows": lambda: 2}),
    # prediction
    "held_bytes": (planner.held_bytes, {"work": lambda: WORK, "gpus": lambda: 2}),
    "options": (planner.options, {"work": lambda: WORK, "gpus": lambda: 2, "gpus_per_node": lambda: 2}),
    "predict": (
        planner.predict,
        {
            "machine": lambda: H200,
            "work": lambda: WORK,
            "gpus": lambda: 2,
            "gpus_per_node": lambda: 2,
            "option": lambda: Option(ra.ring()),
        },
    ),
    "recommend": (planner.recommend, {"predictions": list, "memory": lambda: 1.0}),
    "with_rates": (with_rate, {"hbm_gbs": lambda: 1.0}),
    # doors
    "DeepSpeedParallel": (deepspeed.DeepSpeedParallel, {"mesh": lambda: None}),
    "RingAttention": (deepspeed.RingAttention, {"parallel": lambda: None}),
    "RingAttention of a ring": (ring_attention, dict.fromkeys(("layout", "mask", "softmax_scale", "score"), lambda: None)),
    "attach": (huggingface.attach, {"model": lambda: torch.nn.Linear(2, 2), "layout": lambda: LAYOUT}),
    "detach": (huggingface.detach, {"model": lambda: torch.nn.Linear(2, 2)}),
}


# without a group, sum_gradients does not look at the parameters
EXEMPT = {("sum_gradients", "parameters"), ("finish", "return_stats")}


def named_kinds(annotation: str) -> set[str]:
    """The types that an annotation names; a window is a number."""
    return set(re.findall(r"\w+", annotation)) | ({"int"} if "Window" in annotation else set())


def use(result: Any) -> None:
    """Masks, layouts and schedules are lazy: a value that does not serve must at the latest be refused here."""
    if isinstance(result, ra.Mask):
        result.dense(4)
    elif isinstance(result, ra.Layout):
        result.positions(0)
        result.balance(MASK)
    elif isinstance(result, ra.Schedule):
        result.resolve(PLAN, 2, lambda _: 100).transfers(PLAN)


def problems(name: str, parameter: inspect.Parameter, odd: str) -> str | None:
    """What is wrong with the call that has an odd value for one argument."""
    function, good = CALLS[name]
    make, kinds = ODD[odd]
    arguments = {key: value() for key, value in good.items()}
    try:
        result = function(**{**arguments, parameter.name: make()})
        use(result)
    except ValueError as error:
        return None if error.args and str(error.args[0]) else "an empty message"
    except Exception as error:
        of_user = odd in ("class", "function") and "Callable" in parameter.annotation
        return None if of_user else f"{type(error).__name__}: {error}"
    if not named_kinds(parameter.annotation) & set(kinds.split()):
        return f"taken, but the annotation is {parameter.annotation}"
    if odd == "NumPy's 1":
        wanted = function(**{key: value() for key, value in good.items()} | {parameter.name: 1})
        return None if repr(result) == repr(wanted) else f"{result!r}, but with Python's 1 {wanted!r}"
    return None


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_an_odd_argument_gives_the_right_result_or_a_value_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a picture may be saved
    parameters = inspect.signature(CALLS[name][0]).parameters.values()
    found = {
        f"{parameter.name} = {odd}": problem
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and (name, parameter.name) not in EXEMPT
        for odd in ODD
        if (problem := problems(name, parameter, odd)) is not None
    }
    assert found == {}


def test_every_public_function_is_tried():
    public = {name for name in ra.__all__ if callable(getattr(ra, name))}
    # abstract bases, results that functions return, and functions that torch calls
    untried = {"Mask", "Schedule", "Plan", "Partial", "Report", "Stats", "checkpoint_contexts", "checkpoint_policy"}
    untried |= {"Buckets", "RelativeBias", "ScoreMod", "CacheBatch", "CachedSequence", "OutOfPages", "RecurrenceKernels"}
    assert public - set(CALLS) == untried
    for module in (causal_lm, data, loss, tiled, planner, huggingface, deepspeed):
        functions = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        called_within = {
            "forward_names",
            "check_z_loss",
            "tokens_of",
            "packed_positions",
            "documents_of_positions",
            "packed_documents",
            "check_work",
            "attach_seeded",
        }
        of_transformers = {"register", "ring_attention_forward"}
        assert functions <= set(CALLS) | called_within | of_transformers | {"averaged", "summed"}
