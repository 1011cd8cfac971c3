"""Lightning's Trainer over rings: the parameters of one process that takes the same steps.

They ran with lightning 2.6.6 over gloo on CPUs. It is not in the development environment: without it these tests are skipped.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, shift_labels
from ringattn.training.data import shard_batch
from ringattn.training.loss import averaged, mean_loss

pytestmark = pytest.mark.thorough
pytest.importorskip("lightning.pytorch")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from ringattn.integrations.lightning import RingStrategy  # noqa: E402

N, VOCAB, LR, CLIP, ROWS = 41, 37, 0.5, 0.3, 8
QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


def make_model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def rows():
    """Each begins with its number."""
    tokens = torch.randint(VOCAB, (ROWS, N), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.arange(ROWS)
    return tokens


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.loss, self.seen = CausalLMLoss(make_model()), []

    def setup(self, stage):
        mesh = self.trainer.strategy.mesh
        self.rank, self.layout = mesh.get_local_rank("ring"), ra.zigzag(N, mesh["ring"].size())
        attach(self.loss.model, layout=self.layout, group=self.trainer.strategy.ring)

    def training_step(self, tokens, index):
        self.seen.append(tokens[:, 0].tolist())
        batch = shard_batch(dict(input_ids=tokens, labels=tokens), self.layout, self.rank)
        return mean_loss(self.loss(**batch), batch["shift_labels"], reduction=averaged()).loss

    def validation_step(self, tokens, index):
        self.seen.append(("validation", tokens[:, 0].tolist()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)


def under_lightning(group, ring_size, accumulation):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, TORCHELASTIC_RUN_ID=1)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        module, strategy = Module(), RingStrategy(ring_size)
        options = dict(max_epochs=1, accumulate_grad_batches=accumulation, gradient_clip_val=CLIP, num_sanity_val_steps=0)
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=ranks, **options, **QUIET)
        trainer.fit(module, DataLoader(rows(), batch_size=1), DataLoader(rows()[:4], batch_size=1))
    return module.seen, {name: p.detach() for name, p in module.loss.named_parameters()}


def of_one_process(seen, accumulation):
    """The same steps: `seen` has the rows of each replica in each micro-batch."""
    run = CausalLMLoss(make_model())
    optimizer = torch.optim.SGD(run.parameters(), LR)
    for micro, replicas in enumerate(seen, 1):
        tokens = torch.cat([rows()[number] for number in replicas])
        (run(input_ids=tokens, shift_labels=shift_labels(tokens)) / (len(tokens) * (N - 1)) / accumulation).backward()
        if micro % accumulation == 0:
            assert torch.nn.utils.clip_grad_norm_(run.parameters(), CLIP) > CLIP
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in run.named_parameters()}


@pytest.mark.parametrize(("ring_size", "accumulation"), [(None, 2), (4, 1), (2, 2)])
def test_parameters_are_those_of_one_process(gloo, ring_size, accumulation):
    found = gloo.run(8, under_lightning, ring_size, accumulation)
    size = ring_size or 8
    trained = [[numbers for numbers in seen if isinstance(numbers, list)] for seen, _ in found]
    for rank in range(8):
        assert trained[rank] == trained[rank // size * size], "the ranks of a ring share sequences"
        assert found[rank][0] == found[rank // size * size][0], "in evaluation too"
    replicas = list(zip(*trained[::size]))
    assert sorted(number for step in replicas for numbers in step for number in numbers) == list(range(ROWS)), "each once"
    wanted = of_one_process(replicas, accumulation)
    for _, parameters in found:
        assert parameters.keys() == wanted.keys()
        for name, x in wanted.items():
            torch.testing.assert_close(parameters[name], x, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def refused(group):
    strategy = RingStrategy(3)
    with (
        mock.patch("lightning.pytorch.strategies.DDPStrategy.setup_environment"),
        pytest.raises(ValueError) as error,
    ):
        strategy.setup_environment()
    return str(error.value)


def test_a_ring_that_does_not_divide_the_ranks_is_refused(gloo):
    assert set(gloo.run(8, refused)) == {"ring_size is 3, which does not divide the 8 ranks"}


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="ring_size is 0, but must be at least 1"):
        RingStrategy(0)
    for name in ("process_group", "model_averaging_period"):
        with pytest.raises(ValueError, match=f"{name} is given, but gradients must be averaged over all ranks"):
            RingStrategy(**{name: 3})
    with pytest.raises(ValueError, match="ddp_comm_state is of local SGD"):
        RingStrategy(ddp_comm_state=PostLocalSGDState(None, None, 1))
    with pytest.raises(ValueError, match="there are no ranks yet"):
        RingStrategy(2).ring  # noqa: B018
