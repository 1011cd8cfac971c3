"""The hints of `ringattn.verify`: each common mistake of a model that shards by itself is named, and a right model gets no hint."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ringattn as ra
from ringattn.training.causal_lm import IGNORE

LAYOUT = ra.zigzag(31, 2)  # ranks hold different numbers of tokens


def batch(**more) -> dict:
    ids = torch.randint(23, (2, 31), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, **more)


class Model(nn.Module):
    """One layer with learned positions, around a ring, or with `layout` None whole. `mistake` is a word of `MISTAKES`."""

    def __init__(self, layout: ra.Layout | None = LAYOUT, mistake: str = "", mask: ra.Mask | None = None, group=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(23, 16), nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 23)
        self.layout, self.mistake, self.mask, self.group = layout, mistake, mask, group

    def forward(self, input_ids, position_ids, attention_mask=None):
        if self.mistake == "positions":
            position_ids = torch.arange(input_ids.shape[1])[None]
        elif self.mistake == "positions read":
            position_ids = position_ids * 0 + torch.arange(input_ids.shape[1])
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).unbind(2)
        if self.layout is None or self.mistake == "alone":
            live = None if attention_mask is None else attention_mask.bool()
            keys = torch.ones(q.shape[:2], dtype=torch.bool) if live is None else live
            out = torch.stack([self._one(*(y[n][keys[n]] for y in (q, k, v)), keys[n]) for n in range(len(q))])
        else:
            out = ra.ring_attention(q, k, v, layout=self.layout, mask=self.mask, group=self.group)
        if self.mistake == "no gradient":
            out = out.detach()
        elif self.mistake == "twice the gradient":
            out = 2 * out - out.detach()
        elif self.mistake == "scale":
            out = out * 1.5
        return self.out(x + out.flatten(2))

    def _one(self, q, k, v, live):
        out = torch.zeros(len(live), *v.shape[1:], dtype=v.dtype)
        out[live] = ra.reference.attention(q[None], k[None], v[None], mask=self.mask or ra.causal())[0]
        return out


def summed(model, inputs, reduction="sum"):
    logits = model(inputs["input_ids"], inputs["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), ignore_index=IGNORE, reduction=reduction)


def mean(model, inputs):
    return summed(model, inputs, "mean")


def own_labels(model, inputs):
    logits = model(inputs["input_ids"], inputs["position_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="sum")


def shifts_again(model, inputs):
    logits = model(inputs["input_ids"], inputs["position_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["shift_labels"][:, 1:].flatten(), reduction="sum")


def shifts_within(model, inputs):
    if model.layout is not None:
        labels = torch.cat([inputs["input_ids"][:, 1:], torch.full((2, 1), IGNORE)], 1)
        inputs = {**inputs, "shift_labels": labels}
    return summed(model, inputs)


def times_ranks(model, inputs):
    return summed(model, inputs) * (1 if model.layout is None else dist.get_world_size(model.group))


def gradients_times_ranks(model, inputs):
    value = summed(model, inputs)
    return value if model.layout is None else 2 * value - value.detach()


# the model's mistake, the loss, and what the hint says
MISTAKES = {
    "positions": ("positions", summed, r"at 24 of 31 positions, first at 7 \(row 0 of rank 1\); likely positions .* nothing reads"),
    "positions read": ("positions read", summed, r"first at 7 .* likely positions that each rank counts from 0, or keys"),
    "alone": ("alone", summed, "likely each rank attends to its own shard alone"),
    "attention": ("scale", summed, r"first at 0 \(row 0 of rank 0\); likely the model's attention, mask or layout"),
    "mean": ("", mean, "outputs are right in every row; likely a mean over each rank's tokens"),
    "own labels": (
        "",
        own_labels,
        "likely a label shift within each shard, wrong in shards' last rows: loss= never reads shift_labels",
    ),
    "shifts again": ("", shifts_again, "likely labels that are shifted once more by the loss, within each shard"),
    "shifts within": ("", shifts_within, "likely labels that are shifted within each shard, wrong in shards' last rows"),
    "scaled loss": ("", times_ranks, "likely loss scaling: .* times 2, the number of ranks"),
    "scaled gradients": ("", gradients_times_ranks, "likely gradients that are added up .* times 2, the number of ranks"),
    "no gradient": ("no gradient", summed, r"likely a detached tensor or torch\.no_grad: the gradient of qkv\.weight is 0"),
    "backward": ("twice the gradient", summed, r"likely the backward pass .* the gradient of embed\.weight is not"),
    "none": ("", summed, "^$"),
}


def hints(group):
    torch.set_num_threads(1)
    return {
        name: ra.verify(Model(mistake=mistake, group=group), batch(), layout=LAYOUT, whole=Model(None), loss=loss, group=group)
        for name, (mistake, loss, _) in MISTAKES.items()
    }


def test_mistakes_are_named(gloo):
    first, second = gloo.run(2, hints)
    assert first == second
    for name, (_, _, words) in MISTAKES.items():
        report = first[name]
        assert report.passed == (name == "none")
        assert re.search(words, report.hint), f"{name}: {report.hint}"
        assert str(report).endswith(f"hint: {report.hint}" if report.hint else "all within bounds")


def replaced(group):
    """Hints for a module whose attention verify replaces, in bf16."""

    class Replaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.places, self.out = nn.Embedding(23, 16), nn.Embedding(64, 16), nn.Linear(16, 23)

        def forward(self, input_ids):
            x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
            q = x.unflatten(2, (2, 8)).transpose(1, 2)
            return self.out(x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2))

    def loss(model, inputs):
        return F.cross_entropy(model(inputs["input_ids"]).flatten(0, 1).float(), inputs["shift_labels"].flatten(), reduction="sum")

    return ra.verify(Replaced(), batch(), layout=LAYOUT, loss=loss, group=group, autocast=torch.bfloat16).hint


def of_all_rows(group):
    mask = ra.full()
    found = []
    for mistake in ("positions", "scale"):
        model = Model(mistake=mistake, mask=mask, group=group)
        found.append(ra.verify(model, batch(), layout=LAYOUT, whole=Model(None, mask=mask), loss=summed, group=group).hint)
    return found


def test_where_all_rows_differ_positions_are_one_of_the_causes(gloo):
    for of_positions, of_attention in gloo.run(2, of_all_rows):
        assert of_positions.endswith("mask or layout on shards, not the loss; or its positions, as nothing reads position_ids")
        assert of_attention.endswith("mask or layout on shards, not the loss")


def test_positions_of_a_module_with_torchs_attention_are_named(gloo):
    for hint in gloo.run(2, replaced):
        assert "likely positions that each rank counts from 0, as nothing reads position_ids" in hint


def test_padding_is_named():
    ones = torch.ones(2, 31, dtype=torch.long)
    ones[1, 20:] = 0
    labels = batch()["input_ids"].masked_fill(ones == 0, IGNORE)
    model, whole = (Model(layout, mask=ra.full()) for layout in (ra.zigzag(31, 1), None))

    def loss(model, inputs):
        logits = model(inputs["input_ids"], inputs["position_ids"], inputs["attention_mask"])
        return F.cross_entropy(logits.flatten(0, 1), inputs["shift_labels"].flatten(), reduction="sum")

    report = ra.verify(model, batch(labels=labels, attention_mask=ones), whole=whole, loss=loss)
    assert not report.passed
    assert "likely padding, which the model may attend to" in report.hint


def test_outputs_without_logits_need_a_loss():
    with pytest.raises(ValueError, match=r"Model returns a Tensor without logits .* give loss=, a function"):
        ra.verify(Model(ra.zigzag(31, 1)), batch(), whole=Model(None))
