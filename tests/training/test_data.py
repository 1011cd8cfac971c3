"""`ringattn.training.data`: packed documents, each rank's rows of a batch, and documents found from positions."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading

import numpy as np
import pytest
import torch

import ringattn as ra
from ringattn.runtime.context import Context
from ringattn.runtime.groups import get_context
from ringattn.training.causal_lm import IGNORE
from ringattn.training.data import ShardedBatches, documents_of_positions, pack, packed_positions, shard_batch
from ringattn.transport import SilentTransport

LAYOUTS = {"zigzag": ra.zigzag, "contiguous": ra.contiguous, "striped": ra.striped}


def together(parts: list[torch.Tensor], layout: ra.Layout) -> torch.Tensor:
    """The whole tensor (b, s), from all ranks' rows."""
    whole = parts[0].new_empty(parts[0].shape[0], layout.seq_len)
    for rank, part in enumerate(parts):
        whole[:, layout.positions(rank)] = part
    return whole


def test_packed_documents_see_only_themselves():
    batch = pack([[5, 6, 7], [], torch.tensor([8]), [9, 10]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert batch["shift_labels"].tolist() == [[6, 7, IGNORE, IGNORE, 10, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]


def test_packing_fills_up_and_takes_labels():
    batch = pack([[5, 6, 7]], labels=[[IGNORE, IGNORE, 3]], to=5)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0]]
    assert batch["shift_labels"].tolist() == [[IGNORE, 3, IGNORE, IGNORE, IGNORE]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert pack([[5, 6, 7]], to=3)["cu_seq_lens_q"].tolist() == [0, 3]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("seq_len", "world_size"), [(11, 3), (8, 4), (3, 1)])
def test_shards_of_a_batch_are_the_rows_of_the_layout(name, seq_len, world_size):
    layout = LAYOUTS[name](seq_len, world_size)
    ids = torch.arange(2 * seq_len).view(2, seq_len)
    batch = dict(
        input_ids=ids,
        labels=ids,
        attention_mask=torch.ones_like(ids),
        weights=ids[..., None].expand(-1, -1, 3),
        name="a batch",
        row=ids[:, 0],
    )
    parts = [shard_batch(batch, layout, rank) for rank in range(world_size)]
    assert all(set(part) == {"input_ids", "shift_labels", "position_ids", "weights", "name", "row"} for part in parts)
    assert torch.equal(together([part["input_ids"] for part in parts], layout), ids)
    assert torch.equal(together([part["position_ids"] for part in parts], layout), torch.arange(seq_len).expand(2, -1))
    shifted = together([part["shift_labels"] for part in parts], layout)
    assert torch.equal(shifted[:, :-1], ids[:, 1:])
    assert (shifted[:, -1] == IGNORE).all()
    assert all(torch.equal(part["weights"][..., 1], part["input_ids"]) for part in parts)
    assert all(torch.equal(part["row"], ids[:, 0]) for part in parts)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_shards_of_packed_documents(world_size):
    whole = pack([list(range(1, 8)), [20], list(range(30, 36))])
    layout = ra.zigzag(14, world_size)
    given = {name: whole[name] for name in ("input_ids", "cu_seq_lens_q", "cu_seq_lens_k")} | dict(
        labels=whole["input_ids"], max_length_q=7
    )
    for batch in (whole, given):
        parts = [shard_batch(batch, layout, rank) for rank in range(world_size)]
        for name in ("input_ids", "shift_labels", "position_ids"):
            assert torch.equal(together([part[name] for part in parts], layout), whole[name]), name
        assert all(torch.equal(part["cu_seq_lens_q"], whole["cu_seq_lens_q"]) for part in parts)


@pytest.mark.parametrize("of", [list, torch.tensor, np.array])
def test_padding_behind_the_last_document_is_one_more(of):
    bounds, layout, seen = [0, 3, 7], ra.zigzag(10, 2), []
    batch = dict(
        input_ids=torch.arange(10)[None], labels=torch.arange(10)[None], cu_seq_lens_q=of(bounds), cu_seq_lens_k=of(bounds)
    )
    part = shard_batch(batch, layout, 1)
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 3, 7, 10]
    shifted = together([shard_batch(batch, layout, rank)["shift_labels"] for rank in range(2)], layout)
    assert shifted.tolist() == [[1, 2, IGNORE, 4, 5, 6, IGNORE, IGNORE, IGNORE, IGNORE]]
    batches = ShardedBatches([batch], lambda tokens: layout, 1, prepare=lambda _, mask: seen.append(mask))
    assert [part["cu_seq_lens_q"].tolist() for _, part in batches] == [[0, 3, 7, 10]]
    assert seen == [ra.documents([0, 3, 7, 10])], "the mask of the call"


def test_three_kinds_of_positions_are_cut_too():
    layout = ra.contiguous(6, 2)
    positions = torch.arange(18).view(3, 1, 6)
    part = shard_batch(dict(input_ids=torch.zeros(1, 6).long(), position_ids=positions), layout, 1)
    assert torch.equal(part["position_ids"], positions[:, :, 3:])


def test_a_loaders_batches_come_with_their_layouts():
    loader = [dict(input_ids=torch.arange(n)[None]) for n in (7, 4)]
    seen = list(ShardedBatches(loader, lambda tokens: ra.contiguous(tokens, 2), rank=1))
    assert [layout.seq_len for layout, _ in seen] == [7, 4]
    assert [batch["input_ids"].tolist() for _, batch in seen] == [[[3, 4, 5, 6]], [[2, 3]]]
    assert len(list(ShardedBatches(loader, lambda tokens: ra.contiguous(tokens, 2), rank=0))) == 2


def packed_batches(count):
    return [pack([list(range(first + 3)), list(range(20 - first))]) for first in range(count)]


def ahead(loader, prepare, **options):
    """The loader's batches for rank 1 of 2, prepared on a thread."""
    return ShardedBatches(loader, lambda tokens: ra.contiguous(tokens, 2), rank=1, prepare=prepare, **options)


def threads_of_batches():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ringattn-batches")]


def test_batches_prepared_ahead_are_the_same_in_the_same_order():
    loader, prepared = packed_batches(9), []
    options = dict(of_documents=lambda mask, tokens: ra.balanced(mask, tokens, 2))
    plain = list(ShardedBatches(loader, lambda tokens: ra.contiguous(tokens, 2), rank=1, **options))
    seen = list(ahead(loader, lambda layout, mask: prepared.append((layout, mask, threading.current_thread())), **options))
    assert [layout for layout, _ in seen] == [layout for layout, _ in plain] == [layout for layout, *_ in prepared]
    assert [mask for _, mask, _ in prepared] == [ra.documents(b["cu_seq_lens_q"]) for b in loader]
    assert [layout for layout, _ in seen] == [ra.balanced(mask, 23, 2) for _, mask, _ in prepared]
    assert all(thread is not threading.current_thread() for *_, thread in prepared)
    for (_, one), (_, other) in zip(seen, plain, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert not threads_of_batches()


def test_the_next_batch_is_prepared_while_one_is_computed():
    events = [threading.Event() for _ in range(3)]
    calls = iter(events)
    batches = iter(ahead(packed_batches(3), lambda layout, mask: next(calls).set()))
    next(batches)
    assert events[1].wait(60)
    # one ahead, no more
    assert not events[2].is_set()
    next(batches)
    assert events[2].wait(60)
    batches.close()


def test_batches_without_documents_have_no_mask():
    masks = []
    loader = [dict(input_ids=torch.arange(8)[None])]
    list(ahead(loader, lambda layout, mask: masks.append(mask), of_documents=lambda mask, tokens: ra.striped(tokens, 2)))
    assert masks == [None]
    assert not threads_of_batches()


@pytest.mark.parametrize("how", ["del", "close", "break", "error"])
def test_a_dropped_iterator_leaves_no_thread(how):
    batches = ahead(packed_batches(9), lambda layout, mask: None)
    if how == "break":
        for _ in batches:
            break
    elif how == "error":
        with contextlib.suppress(KeyError):
            for _ in batches:
                raise KeyError
    else:
        iterator = iter(batches)
        next(iterator)
        assert threads_of_batches()
        iterator.close() if how == "close" else None
        del iterator
    gc.collect()
    assert not threads_of_batches()


@pytest.mark.parametrize("prepare", [None, lambda layout, mask: None], ids=["plain", "ahead"])
def test_a_loader_that_gives_none_does_not_end_the_batches(prepare):
    batches = iter(ahead([packed_batches(1)[0], None, packed_batches(1)[0]], prepare))
    next(batches)
    with pytest.raises(ValueError, match="a batch of the loader is None, but must be a Mapping: give a dict of whole sequences"):
        next(batches)


class Resumable:
    """A loader whose state is what it goes on with."""

    def __init__(self):
        self.state = {"next": [0]}

    def __iter__(self):
        while self.state["next"][0] < 5:
            self.state["next"][0] += 1
            yield packed_batches(5)[self.state["next"][0] - 1]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("prepare", [None, lambda layout, mask: None], ids=["plain", "ahead"])
def test_a_loader_is_resumed_after_the_batch_that_was_yielded_last(prepare):
    def lengths(batches):
        return [batch["cu_seq_lens_q"].tolist()[1] for _, batch in batches]

    batches = ahead(Resumable(), prepare)
    assert batches.state_dict() == {"next": [0]}
    states = [copy.deepcopy(batches.state_dict()) for _ in batches]
    assert [state["next"] for state in states] == [[1], [2], [3], [4], [5]]
    assert batches.state_dict() == {"next": [5]}
    for seen, state in enumerate(states, 1):
        batches.load_state_dict(copy.deepcopy(state))
        assert batches.state_dict() == state
        assert lengths(batches) == [3, 4, 5, 6, 7][seen:]
    # and after an iteration that was left
    batches.load_state_dict(states[0])
    for _ in batches:
        break
    assert batches.state_dict() == {"next": [2]}


@pytest.mark.parametrize("call", [lambda batches: batches.state_dict(), lambda batches: batches.load_state_dict({})])
def test_a_loader_that_cannot_be_resumed_is_named(call):
    with pytest.raises(ValueError, match=r"the loader is a list, which has no (load_)?state_dict: give one that can be resumed"):
        call(ahead([], None))


def failing(where, at):
    """(loader, prepare) of which one fails at a batch."""

    def loader():
        for number, batch in enumerate(packed_batches(5)):
            if where == "loader" and number == at:
                raise OSError("the disk is gone")
            if where == "batch" and number == at:
                del batch["input_ids"]
            yield batch

    count = itertools.count()

    def prepare(layout, mask):
        if next(count) == at and where == "prepare":
            raise RuntimeError("no plan") from KeyError("the cause")

    return loader(), prepare


@pytest.mark.parametrize(("where", "kind"), [("loader", OSError), ("batch", ValueError), ("prepare", RuntimeError)])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.some(4)
def test_an_error_comes_in_the_place_of_its_batch(where, kind, at):
    batches = iter(ahead(*failing(where, at)))
    for _ in range(at):
        next(batches)
    with pytest.raises(kind) as caught:
        next(batches)
    if where == "prepare":
        assert isinstance(caught.value.__cause__, KeyError)
    assert {"loader": "_load"}.get(where, "_ready") in [entry.name for entry in caught.traceback]
    del caught, batches
    gc.collect()
    assert not threads_of_batches()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.arange(index + 1, index + 9)


def test_loaders_with_forked_workers():
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork", collate_fn=lambda ids: {"input_ids": ids[None]}
    )
    for _ in range(2):
        seen = [batch["input_ids"].tolist() for _, batch in ahead(loader, lambda layout, mask: None)]
        assert seen == [[list(range(first + 5, first + 9))] for first in range(6)]
    assert not threads_of_batches()


def test_batches_prepared_for_a_group_take_the_path_of_seen_ones(monkeypatch):
    group, threads = SilentTransport(1, 2), []
    made = Context._make_rank_attention

    def make(*arguments):
        threads.append(threading.current_thread())
        return made(*arguments)

    monkeypatch.setattr(Context, "_make_rank_attention", make)
    q = torch.zeros(1, 4, 2, 8)
    prepare = functools.partial(ra.prepare, like=(q, q, q), group=group)
    for layout, batch in ahead(packed_batches(6), prepare, of_documents=lambda mask, tokens: ra.balanced(mask, tokens, 2)):
        x = torch.zeros(1, layout.lengths[1], 2, 8)
        ra.ring_attention(x, x, x, layout=layout, mask=ra.documents(batch["cu_seq_lens_q"]), group=group)
    assert len(threads) == 6
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("name", ["layouts", "of_documents", "prepare"])
def test_functions_of_batches_are_checked(name):
    options = dict(layouts=lambda tokens: ra.contiguous(tokens, 2)) | {name: 3}
    with pytest.raises(ValueError, match=f"{name} is 3, but must be a function"):
        ShardedBatches([], rank=0, **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (dict(labels=torch.zeros(1, 6)), r"the batch has \['labels'\], but neither"),
        (dict(input_ids=torch.zeros(1, 5)), r"input_ids has shape \(1, 5\), but zigzag\(seq_len=6, world_size=2\) is for 6"),
        (dict(input_ids=torch.zeros(1, 6), token_type_ids=torch.zeros(1, 3)), r"token_type_ids has shape \(1, 3\)"),
        (dict(input_ids=torch.zeros(1, 6), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]])), "attention_mask hides tokens"),
        (dict(input_ids=torch.zeros(1, 6), attention_mask=torch.tensor([[1, 1, 2, 2, 2, 2]])), "attention_mask counts to 2"),
        (
            dict(input_ids=torch.zeros(1, 6), labels=torch.zeros(1, 6), shift_labels=torch.zeros(1, 6)),
            "both labels and shift_labels",
        ),
        (
            dict(input_ids=torch.zeros(6, 6), labels=torch.zeros(6)),
            r"labels are of shape \(6,\), but must be a tensor of shape \(6, 6\)",
        ),
        (dict(input_ids=torch.zeros(1, 6), labels=[[0] * 6]), "labels are a list"),
        (dict(input_ids=[[0] * 6]), "the batch's tokens are a list"),
        (dict(input_ids=torch.zeros(1, 6), labels=torch.zeros(1, 6)), r"labels are of torch\.float32, but must be integers"),
        (dict(input_ids=torch.zeros(1, 6), cu_seq_lens_q=[0, 3, 9]), "cu_seq_lens_q ends with 9, but the sequence has 6 tokens"),
        (dict(input_ids=torch.zeros(1, 6), cu_seq_lens_k=[3, 6]), r"cu_seq_lens_k starts with \[3\]"),
        (
            dict(input_ids=torch.zeros(1, 6), cu_seq_lens_q=[0, 6], cu_seq_lens_k=[0, 2, 6]),
            "cu_seq_lens_q and cu_seq_lens_k differ",
        ),
        (dict(input_ids=torch.zeros(1, 6), position_ids=torch.arange(6)), r"position_ids are of shape \(6,\)"),
        (dict(input_ids=torch.zeros(1, 6), position_ids=[[0] * 6]), "position_ids are a list"),
        (dict(input_ids=torch.zeros(1, 6), attention_mask=torch.ones(1, 1, 6, 6)), r"attention_mask has shape \(1, 1, 6, 6\)"),
        (dict(input_ids=torch.zeros(6)), r"the batch's tokens are of shape \(6,\)"),
    ],
    ids=[
        *("no tokens", "length", "other length", "padding", "packing mask", "two labels", "a label a row", "list of labels"),
        *("list", "float labels", "bounds past the end", "bounds past the start", "two bounds", "positions of no batch"),
        *("list of positions", "4-D mask", "no batch"),
    ],
)
def test_bad_batches_are_named(batch, message):
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, ra.zigzag(6, 2), 0)


@pytest.mark.parametrize(
    "told",
    [
        dict(cu_seq_lens_q=[0, 3, 6]),
        dict(cu_seq_lens_k=[0, 3, 6]),
        dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])),
        dict(position_ids=torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])),
    ],
    ids=["bounds", "bounds of keys", "positions", "positions from 1"],
)
def test_labels_do_not_cross_documents(told):
    """If bounds are given, tokens after the last document predict nothing either, because they see nothing."""
    ids = torch.arange(8)[None]
    after = 7 if "position_ids" in told else IGNORE
    part = shard_batch(dict(input_ids=ids, labels=ids, **told), ra.contiguous(8, 1), 0)
    assert part["shift_labels"].tolist() == [[1, 2, IGNORE, 4, 5, IGNORE, after, IGNORE]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_narrow_tokens_and_arrays_are_taken(dtype):
    """As in a memory-mapped file. Labels become int64, because `IGNORE` is negative."""
    ids = np.arange(6, dtype=dtype)[None]
    part = shard_batch(dict(input_ids=ids, shift_labels=ids), ra.contiguous(6, 2), 1)
    assert part["shift_labels"].dtype == torch.int64
    part = shard_batch(dict(input_ids=ids, labels=ids, names=np.array(["a document"])), ra.contiguous(6, 2), 1)
    assert part["input_ids"].tolist() == [[3, 4, 5]]
    assert part["shift_labels"].tolist() == [[4, 5, IGNORE]]
    assert part["shift_labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[], []],), {}, "tokens holds 2 documents without a token"),
        (([[1, 2], [3]],), dict(to=2), "the documents have 3 tokens, but to is 2"),
        (([[1, 2], [3]],), dict(labels=[[1, 2], []]), r"labels have the lengths \[2, 0\] and tokens \[2, 1\]"),
        (([[1.5]],), {}, r"tokens\[0\] has dtype float64"),
    ],
    ids=["nothing", "too long", "labels", "floats"],
)
def test_bad_documents_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments, **options)


def test_positions_after_the_last_document_go_on():
    packed = ra.documents(lengths=[3, 0, 2])
    assert packed_positions(packed, torch.arange(8)).tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def counted_within_shards(group, layout):
    positions = torch.arange(layout.lengths[group.rank()])[None]
    with pytest.raises(ValueError) as raised:
        documents_of_positions(positions, layout, get_context(group).ranks)
    return str(raised.value)


def test_positions_counted_within_shards_are_refused(gloo):
    """They look like a document a rank."""
    uneven = ra.Layout(13, spans=((ra.Span(9, 4),), (ra.Span(0, 4), ra.Span(4, 5))))
    for layout in (ra.contiguous(13, 2), uneven):
        for said in gloo.run(2, counted_within_shards, layout):
            assert said.startswith(f"position_ids restart just where the shards of {layout!r} do")


def documents_here(group, layout, bounds):
    positions = packed_positions(ra.documents(cu_seqlens=bounds), layout.positions(group.rank()))
    found = documents_of_positions(positions.expand(2, -1), layout, get_context(group).ranks)
    return None if found is None else list(found.cu_seqlens)


@pytest.mark.parametrize("bounds", [[0, 13], [0, 5, 6, 13], [0, *range(1, 14)]], ids=["one", "three", "each its own"])
@pytest.mark.parametrize(("name", "world_size"), [("contiguous", 3), ("striped", 4)])
def test_documents_are_found_from_positions(gloo, name, world_size, bounds):
    found = gloo.run(world_size, documents_here, LAYOUTS[name](13, world_size), bounds)
    assert found == [None if len(bounds) == 2 else bounds] * world_size
