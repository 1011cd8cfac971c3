"""A model that accelerate prepares, around a ring: a step gives the parameters of one process, with accumulation and clipping."""

import importlib.util
import itertools
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import IGNORE, CausalLMLoss, shift_labels, sum_gradients
from ringattn.training.data import shard_batch
from ringattn.training.loss import Reduction, count_tokens, mean_loss

# `make test` installs it, except on a GPU host without network
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")

HAS_TRL = importlib.util.find_spec("trl") is not None  # trl needs Python 3.11
N, VOCAB, LR, CLIP = 41, 37, 0.5, 0.3


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def batch(replica, micro):
    """A sequence; the number of tokens that count differs between ranks, replicas and micro-batches."""
    ids = torch.randint(VOCAB, (1, N), generator=torch.Generator().manual_seed(10 * micro + replica))
    labels = shift_labels(ids)
    labels[:, 3 : 9 + 4 * replica + 2 * micro] = IGNORE
    return dict(input_ids=ids, shift_labels=labels)


def step_of_one_process(replicas, accumulation, smoothing=0.0):
    """The mean over all tokens and the parameters after a step of plain SGD with clipping."""
    run = CausalLMLoss(make_model())
    batches = [batch(replica, micro) for replica in range(replicas) for micro in range(accumulation)]
    summed = [
        run(**one) if not smoothing else summed_loss(run.model(one["input_ids"]), one["shift_labels"], smoothing) for one in batches
    ]
    loss = sum(summed) / sum(int((one["shift_labels"] != IGNORE).sum()) for one in batches)
    loss.backward()
    assert nn.utils.clip_grad_norm_(run.parameters(), CLIP) > CLIP
    torch.optim.SGD(run.parameters(), LR).step()
    return loss.item(), {name: p.detach() for name, p in run.named_parameters()}


def mean_of(state, replicas, accumulation):
    """The mean loss over all tokens of all batches, with these weights."""
    model = make_model()
    model.load_state_dict(state)
    batches = [batch(replica, micro) for replica in range(replicas) for micro in range(accumulation)]
    with torch.no_grad():
        return sum(CausalLMLoss(model)(**one).item() for one in batches) / sum(
            int((one["shift_labels"] != IGNORE).sum()) for one in batches
        )


def summed_loss(outputs, labels, smoothing):
    logits = outputs.logits.flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)


@patch.dict(os.environ)  # accelerate keeps its plugins in the environment
def step_under_accelerate(group, accumulation, replicas, device="cpu", fsdp=False):
    """The same step on this rank of a mesh (replicas, ring)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # accelerate takes it for the GPU's number, and ranks may share one
    local_rank = torch.cuda.current_device() if device == "cuda" else rank
    names = dict(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="localhost")
    os.environ.update({name: str(value) for name, value in names.items()})  # as torchrun or accelerate launch would
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    ring = world_size // replicas
    mesh = init_device_mesh(device, (replicas, ring), mesh_dim_names=("data", "ring"))
    options = {}
    if fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
        )
    accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=accumulation, **options)
    assert accelerator.num_processes == world_size
    model, layout = make_model(), ra.zigzag(N, ring)
    attach(model, layout=layout, group=mesh["ring"])
    run = CausalLMLoss(model)
    run, optimizer = accelerator.prepare(run, torch.optim.SGD(run.parameters(), LR))
    whole = [batch(mesh.get_local_rank("data"), micro) for micro in range(accumulation)]
    here = mesh.get_local_rank("ring")
    shards = [{name: ra.shard(x, layout, here).to(accelerator.device) for name, x in one.items()} for one in whole]
    tokens = count_tokens(*(one["shift_labels"] for one in shards))
    mean = 0.0
    for one in shards:
        with accelerator.accumulate(run):
            step = mean_loss(run(**one), one["shift_labels"], reduction=Reduction(world_size * accumulation), tokens=tokens)
            accelerator.backward(step.loss)
            mean += step.mean.item()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    named = accelerator.unwrap_model(run).named_parameters()
    found = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu() for name, p in named}
    AcceleratorState._reset_state(reset_partial_state=True)
    return mean, found


@patch.dict(os.environ)
def step_under_the_trainer(group, accumulation, replicas, folder, smoothing=0.0, by_the_trainer=False, evaluate_first=False):
    """The same step by transformers' Trainer, which itself counts the labels of all ranks, or the message with which it is refused."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="localhost", MASTER_PORT=29511)
    os.environ.update({name: str(value) for name, value in names.items()})
    from accelerate.state import AcceleratorState
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("data", "ring"))
    model, layout = make_model(), ra.zigzag(N, world_size // replicas)
    attach(model, layout=layout, group=mesh["ring"], ignore=["num_items_in_batch"] if smoothing and not by_the_trainer else [])

    def cut(rows):
        shards = shard_batch(rows[0], layout, mesh.get_local_rank("ring"))
        return {**shards, "labels": shards["shift_labels"]}

    class Replicas(RingTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, collate_fn=cut)

        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(self.eval_dataset, collate_fn=cut)

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, max_steps=1, max_grad_norm=CLIP, optim="sgd",
        learning_rate=LR, lr_scheduler_type="constant", use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no",
        disable_tqdm=True, eval_on_start=not smoothing, label_smoothing_factor=smoothing if by_the_trainer else 0.0,
    )  # fmt: skip
    dataset = [batch(mesh.get_local_rank("data"), micro) for micro in range(accumulation)]

    def smoothed(outputs, labels, num_items_in_batch):
        return summed_loss(outputs, labels, smoothing) / num_items_in_batch

    trainer = Replicas(
        model,
        arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        compute_loss_func=smoothed if smoothing and not by_the_trainer else None,
    )
    if evaluate_first:
        expected = mean_of(model.state_dict(), replicas, accumulation)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    before = mean_of(model.state_dict(), replicas, accumulation)
    mean = torch.tensor(trainer.train().training_loss, dtype=torch.float64)  # of this rank's tokens, times the number of ranks
    dist.all_reduce(mean)
    if not smoothing:
        assert trainer.state.log_history[0]["eval_loss"] == pytest.approx(before, rel=1e-6), "before the first step"
        expected = mean_of(model.state_dict(), replicas, accumulation)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    AcceleratorState._reset_state(reset_partial_state=True)
    return mean.item() / world_size, {f"model.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def processes():
    """Four separate ranks, because accelerate uses all ranks of the default group."""
    from ranks import Ranks

    pool = Ranks(
        "gloo", 4, ("accelerate", "transformers.models.llama.modeling_llama", *(["ringattn.integrations.trl"] if HAS_TRL else []))
    )
    yield pool
    pool.close()


def assert_same(found, replicas, accumulation, within, smoothing=0.0):
    loss, parameters = step_of_one_process(replicas, accumulation, smoothing)
    for mean, own in found:
        assert mean == pytest.approx(loss, rel=1e-6)
        assert own.keys() == parameters.keys()
        for name, expected in parameters.items():
            torch.testing.assert_close(own[name], expected, rtol=0, atol=within * expected.abs().max().item(), msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_equals_that_of_one_process(processes, accumulation):
    assert_same(processes.run(4, step_under_accelerate, accumulation, 2), 2, accumulation, 1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_of_the_trainer_equals_that_of_one_process(processes, accumulation, tmp_path):
    assert_same(processes.run(4, step_under_the_trainer, accumulation, 2, str(tmp_path), timeout=120), 2, accumulation, 1e-6)


@pytest.mark.thorough
def test_a_step_of_the_trainer_with_a_custom_loss(processes, tmp_path):
    """The loss smooths labels: the one given, or the Trainer's `label_smoothing_factor`."""
    found = processes.run(4, step_under_the_trainer, 2, 2, str(tmp_path), 0.3, timeout=120)
    assert_same(found, 2, 2, 1e-6, smoothing=0.3)
    found = processes.run(4, step_under_the_trainer, 2, 2, str(tmp_path), 0.3, True, timeout=120)
    assert_same(found, 2, 2, 1e-6, smoothing=0.3)


@pytest.mark.thorough
def test_the_trainer_evaluates_before_it_trains(processes, tmp_path):
    found = processes.run(4, step_under_the_trainer, 2, 2, str(tmp_path), 0.0, False, True, timeout=120)
    assert_same(found, 2, 2, 1e-6)


@patch.dict(os.environ)
def means_of_each_rank(group, folder, smoothing):
    """What the Trainer says on this rank to a loss that is divided by this rank's own tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="localhost", MASTER_PORT=29511)
    os.environ.update({name: str(value) for name, value in names.items()})
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    model = make_model()
    attach(model)
    own = dict(average_tokens_across_devices=False, label_smoothing_factor=smoothing)
    arguments = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to=[], **own)
    with pytest.raises(ValueError) as refused:
        RingTrainer(model, arguments)
    AcceleratorState._reset_state(reset_partial_state=True)
    return str(refused.value)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_means_of_each_ranks_own_tokens_are_refused(processes, tmp_path, smoothing):
    for message in processes.run(4, means_of_each_rank, str(tmp_path), smoothing, timeout=120):
        assert message.startswith("average_tokens_across_devices is False, but")


ROWS, EPOCHS, LENGTHS = 6, 2, (N, 30, 17, 35, 22, 28)


def row(index):
    ids = torch.randint(2, VOCAB, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[: 3 + index] = IGNORE
    return dict(input_ids=ids, labels=labels)


def padded(rows):
    """A collator of rows of several lengths, as those of trl and transformers: padding on the right, whose labels do not count."""
    longest = max(len(one["input_ids"]) for one in rows)
    pad = {"input_ids": 1, "labels": IGNORE, "attention_mask": 0}
    rows = [{**one, "attention_mask": torch.ones_like(one["input_ids"])} for one in rows]
    return {
        name: torch.stack([nn.functional.pad(one[name], (0, longest - len(one[name])), value=pad[name]) for one in rows])
        for name in pad
    }


def packed(rows):
    """A collator of transformers that puts rows one after the other, each with positions of its own."""
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()([{name: value.tolist() for name, value in one.items()} for one in rows])


@patch.dict(os.environ)
def epochs_under_the_trainer(group, folder, collator):
    """Two epochs with the Trainer's own loaders, of rows that are padded: the parameters, the order of rows, and the losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="localhost", MASTER_PORT=29511)
    os.environ.update({name: str(value) for name, value in names.items()})
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    model, seen = make_model(), []
    attach(model, group=mesh["ring"])

    def collate(rows):
        seen.append([next(i for i in range(ROWS) if torch.equal(row(i)["input_ids"], one["input_ids"])) for one in rows])
        return collator(rows)

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=EPOCHS,
        optim="sgd", learning_rate=LR, lr_scheduler_type="constant", use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no",
        disable_tqdm=True, max_grad_norm=CLIP, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [row(i) for i in range(ROWS)]
    trainer = RingTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:5], data_collator=collate)
    assert trainer.get_total_train_batch_size(arguments) == 8, "2 rows of 2 steps on 2 rings"
    trainer.train()
    orders, evaluated = list(seen), trainer.evaluate()["eval_loss"]
    AcceleratorState._reset_state(reset_partial_state=True)
    return evaluated, {name: p.detach() for name, p in model.named_parameters()}, orders


def summed_of(model, rows):
    """The sum of losses over the tokens of rows, one by one, and their number."""
    total, tokens = torch.zeros(()), 0
    for one in rows:
        logits = model(input_ids=one["input_ids"][None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, one["labels"][1:], ignore_index=IGNORE, reduction="sum")
        tokens += int((one["labels"][1:] != IGNORE).sum())
    return total, tokens


@pytest.mark.parametrize("collator", [padded, packed])
def test_epochs_with_the_trainers_own_loaders(processes, tmp_path, collator):
    found = processes.run(4, epochs_under_the_trainer, str(tmp_path), collator, timeout=180)
    # 3 rows a ring and epoch, in batches of 2 and 1, of which both make one step
    rings = [found[0][2], found[2][2]]
    assert found[1][2] == rings[0] and found[3][2] == rings[1], "ranks of a ring share their rows"
    epochs = [[[*ring[2 * epoch], *ring[2 * epoch + 1]] for ring in rings] for epoch in range(EPOCHS)]
    assert all(sorted([*epoch[0], *epoch[1]]) == list(range(ROWS)) for epoch in epochs), "each row once an epoch"
    assert epochs[0] != epochs[1], "shuffled anew"
    model = make_model()
    for epoch in epochs:
        total, tokens = summed_of(model, [row(i) for i in [*epoch[0], *epoch[1]]])
        model.zero_grad()
        (total / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        torch.optim.SGD(model.parameters(), LR).step()
    for evaluated, parameters, _ in found:
        for name, expected in model.named_parameters():
            torch.testing.assert_close(
                parameters[name], expected.detach(), rtol=0, atol=3e-6 * expected.abs().max().item(), msg=name
            )
        total, tokens = summed_of(model, [row(i) for i in range(5)])
        assert evaluated == pytest.approx(total.item() / tokens, rel=1e-5), "5 rows on 2 rings: one is there twice, and counts once"


def loss_of_a_short_batch(group, collator):
    """The loss of rows of 1 and 2 tokens, of which a rank's part is that of the loaders' batch."""
    from ringattn.integrations.trainer import _Cut

    model = make_model()
    attach(model, group=group)
    rows = [dict(input_ids=row(i)["input_ids"][: i + 1], labels=row(i)["input_ids"][: i + 1]) for i in range(2)]
    total, tokens = summed_of(model_alone := make_model(), rows)
    total.backward()
    batch = _Cut(collator, model.ringattn, None)(rows)
    loss = model(**batch, num_items_in_batch=1).loss
    loss.backward()
    sum_gradients(model.parameters(), group)
    dist.all_reduce(loss.detach(), group=group)
    pairs = zip(model.parameters(), model_alone.parameters(), strict=True)
    return tokens, loss.item() - total.item(), max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("collator", [padded, packed])
def test_a_batch_of_fewer_tokens_than_ranks_is_padded(processes, collator):
    for tokens, loss, gradients in processes.run(4, loss_of_a_short_batch, collator):
        assert tokens == 1
        assert abs(loss) < 1e-5 and gradients < 1e-6


@patch.dict(os.environ)
def packed_step_under_trl(group, folder):
    """A step of trl's trainer on this rank of two rings, whose batches are documents in one row: the loss and the parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # CI: trl sends no figures of its use
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="localhost", MASTER_PORT=29511, CI=1)
    os.environ.update({name: str(value) for name, value in names.items()})
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig

    from ringattn.integrations.trl import RingSFTTrainer

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    model = make_model()
    attach(model, group=mesh["ring"])
    settings = SFTConfig(
        folder, padding_free=True, max_length=None, per_device_train_batch_size=ROWS // 2, max_steps=1, average_tokens_across_devices=True,
        optim="sgd", learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=CLIP, bf16=False, use_cpu=True, ddp_backend="gloo",
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, gradient_checkpointing=False,
        dataset_kwargs=dict(skip_prepare_dataset=True),
    )  # fmt: skip
    rows = Dataset.from_list([{name: value.tolist() for name, value in row(i).items()} for i in range(ROWS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})), pad_token="<pad>")
    trainer = RingSFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer.state.log_history, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.skipif(not HAS_TRL, reason="needs trl")
def test_a_step_of_trls_trainer_equals_that_of_one_process(processes, tmp_path):
    found = processes.run(4, packed_step_under_trl, str(tmp_path), timeout=180)
    model = make_model()
    total, tokens = summed_of(model, [row(i) for i in range(ROWS)])
    (total / tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.SGD(model.parameters(), LR).step()
    logged = found[0][0][0]
    assert logged["loss"] == pytest.approx(total.item() / tokens, rel=1e-6)
    assert logged["num_tokens"] == sum(LENGTHS), "each token once, not once a rank of its ring"
    for _, parameters in found:
        for name, expected in model.named_parameters():
            torch.testing.assert_close(
                parameters[name], expected.detach(), rtol=0, atol=3e-6 * expected.abs().max().item(), msg=name
            )


@patch.dict(os.environ)
def loaded_by_accelerate(group, ring, problem, accumulation=1):
    """The rows that a prepared loader gives this rank, a batch after the other, the ranks of its ring, and the parameters in the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="localhost")
    os.environ.update({name: str(value) for name, value in names.items()})
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradientAccumulationPlugin
    from torch.utils.data import DataLoader

    from ringattn.integrations.accelerate import RingParallelismConfig

    if problem is not None:
        with pytest.raises(ValueError) as refused:
            RingParallelismConfig(**problem).get_device_mesh("cpu")
        return str(refused.value)
    config = RingParallelismConfig(ring_size=ring)
    with pytest.raises(ValueError, match="the ring is not known before the mesh"):
        config.ring  # noqa: B018
    try:
        # the last micro-batches are fetched before the first of them runs
        plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, parallelism_config=config, gradient_accumulation_plugin=plugin)
        model = make_model()
        attach(model, group=config.ring)
        run, optimizer = accelerator.prepare(CausalLMLoss(model), torch.optim.SGD(model.parameters(), LR))
        rows = [dict(input_ids=torch.arange(i, i + 12) % VOCAB) for i in range(8)]
        loader = accelerator.prepare(DataLoader(rows, batch_size=2))
        seen, layout = [], ra.zigzag(12, ring)
        batches = iter(loader)
        while micro := list(itertools.islice(batches, accumulation)):
            seen += [whole["input_ids"][:, 0].tolist() for whole in micro]
            shards = [shard_batch({**whole, "labels": whole["input_ids"]}, layout, config.ring.get_local_rank()) for whole in micro]
            tokens = count_tokens(*(one["shift_labels"] for one in shards))
            for one in shards:
                with accelerator.accumulate(run):
                    reduction = Reduction(world_size * accumulation)
                    step = mean_loss(run(**one, layout=layout), one["shift_labels"], reduction=reduction, tokens=tokens)
                    accelerator.backward(step.loss)
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return seen, dist.get_process_group_ranks(config.ring.get_group()), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.thorough
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ring", [2, 4])
def test_prepared_loaders_deal_rows_to_rings(processes, ring, accumulation):
    found = processes.run(4, loaded_by_accelerate, ring, None, accumulation)
    rings = 4 // ring
    model, together = make_model(), 2 * rings * accumulation
    for step in range(8 // together):
        rows = torch.stack([torch.arange(i, i + 12) % VOCAB for i in range(together * step, together * (step + 1))])
        F.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        torch.optim.SGD(model.parameters(), LR).step()
        model.zero_grad()
    for rank, (seen, members, parameters) in enumerate(found):
        number = rank // ring
        assert seen == [[i, i + 1] for i in range(2 * number, 8, 2 * rings)]
        assert members == list(range(number * ring, (number + 1) * ring))
        for name, expected in model.named_parameters():
            torch.testing.assert_close(
                parameters[name], expected.detach(), rtol=0, atol=3e-6 * expected.abs().max().item(), msg=name
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (dict(ring_size=3), "ring_size must divide them"),
        (dict(ring_size=2, cp_size=2), "cp_size is 2"),
        (dict(ring_size=2, tp_size=2), "tp_size is 2"),
        (dict(ring_size=2, dp_replicate_size=2), "for DDP leave both out"),
        (dict(ring_size=2, dp_shard_size=3), "dp_shard_size is 3"),
        (dict(dp_shard_size=4), "use accelerate's ParallelismConfig"),
        (dict(ring_size=2, dp_shard_size=8), "there are 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(processes, problem, message):
    assert all(message in found for found in processes.run(4, loaded_by_accelerate, 2, problem))


@pytest.mark.gpu
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_a_step_on_gpus_equals_that_of_one_process(nccl, fsdp):
    count = nccl.size
    replicas = 1 if count % 2 else 2
    assert_same(nccl.run(count, step_under_accelerate, 2, replicas, "cuda", fsdp, timeout=120), replicas, 2, 5e-6)
