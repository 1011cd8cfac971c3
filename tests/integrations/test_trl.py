"""trl's trainers around a ring give the parameters, losses and figures of trl's own in one process; what they cannot do is refused.

A packed step on four ranks is in test_accelerate.py, with its processes.
"""

import importlib.util
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.huggingface import attach, detach

# trl needs Python 3.11
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
]

VOCAB = 37
LENGTHS = (30, 5, 17, 41, 22, 9, 33, 12)
FIGURES = ("loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy", "rewards/margins", "logps/chosen", "kl", "reward")
COMMON = dict(
    max_steps=3, learning_rate=0.05, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.5, use_cpu=True, bf16=False, report_to=[],
    save_strategy="no", disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, gradient_accumulation_steps=2,
)  # fmt: skip


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.2, **sizes))


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def ids(length, seed):
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(length, seed):
    return " ".join(f"w{i}" for i in ids(length, seed))


def documents():
    """Rows of mixed lengths, whose first tokens are a prompt."""
    return [dict(input_ids=ids(n, i), labels=[-100] * (3 + i % 2) + ids(n, i)[3 + i % 2 :]) for i, n in enumerate(LENGTHS)]


def pairs():
    lengths = [(5 + 3 * i, 4 + 2 * (i % 3), 3 + 5 * (i % 2)) for i in range(8)]
    return [
        dict(prompt=f"{text(a, i)} ", chosen=text(b, 100 + i), rejected=text(c, 200 + i)) for i, (a, b, c) in enumerate(lengths)
    ]


def prompts():
    return [dict(prompt=text(4 + 3 * (i % 4), i)) for i in range(16)]


def reward(completions, **columns):
    return [float(sum(map(ord, one)) % 7) for one in completions]


def rollout(asked, trainer):
    """Completions that follow from the prompts; other ranks than a ring's first return what must not count."""
    prompt_ids = trainer.processing_class(asked)["input_ids"]
    rank = getattr(trainer, "_ring", None)
    odd = 0 if rank is None else rank.rank
    completions = [ids(3 + (5 * i) % 9, 31 * sum(one) + i + odd) for i, one in enumerate(prompt_ids)]
    return dict(prompt_ids=prompt_ids, completion_ids=completions, logprobs=None)


def sft(kinds, model, settings, folder, **given):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(documents())
    kind = kinds.RingSFTTrainer if kinds else SFTTrainer
    given = {"args": SFTConfig(folder, **settings), **given}
    return kind(model, train_dataset=rows, eval_dataset=rows.select(range(5)), **given)


def dpo(kinds, model, settings, folder, **given):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows, reference = Dataset.from_list(pairs()), make_model()
    for parameter in reference.parameters():
        parameter.data.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    kind = kinds.RingDPOTrainer if kinds else DPOTrainer
    settings = DPOConfig(folder, **settings)
    return kind(model, reference, args=settings, train_dataset=rows, eval_dataset=rows.select(range(4)), **given)


def grpo(kinds, model, settings, folder, **given):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model.config._name_or_path = os.path.dirname(folder) + "/model"  # from where trl loads the reference
    settings = GRPOConfig(folder, max_completion_length=8, **settings)
    kind = kinds.RingGRPOTrainer if kinds else GRPOTrainer
    rows = Dataset.from_list(prompts())
    return kind(model, reward, args=settings, train_dataset=rows, eval_dataset=rows.select(range(4)), **given)


def act_as_launched():
    """Set the variables of torchrun. CI: trl sends no figures of its use."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_PORT=29511, CI=1)
    os.environ.update({"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in names.items()})


@patch.dict(os.environ)
def trained(group, make, ring, folder, settings, given, evaluates):
    """Three steps of a trainer on this rank, by trl's own without a ring: figures, parameters' changes, and losses of evaluations."""
    act_as_launched()
    world_size = dist.get_world_size()
    from accelerate.state import AcceleratorState

    from ringattn.integrations import trl as kinds

    model = make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if ring:
        mesh = init_device_mesh("cpu", (world_size // ring, ring), mesh_dim_names=("data", "ring"))
        attach(model, group=mesh["ring"])
    settings = {**COMMON, **settings, "ddp_backend": "gloo" if world_size > 1 else None}
    try:
        trainer = make(kinds if ring else None, model, settings, folder, processing_class=make_tokenizer(), **given)
        first = trainer.evaluate()["eval_loss"] if evaluates else 0.0
        trainer.train()
        last = trainer.evaluate()["eval_loss"] if evaluates else 0.0
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    figures = [{name: logs[name] for name in FIGURES if name in logs} for logs in trainer.state.log_history if "loss" in logs]
    return figures, {name: p.detach() - before[name] for name, p in model.named_parameters()}, (first, last)


@pytest.fixture(scope="module")
def processes():
    """Ranks over gloo by their number: accelerate uses all ranks of the default group."""
    from ranks import Ranks

    imports = ("accelerate", "transformers.models.llama.modeling_llama", "ringattn.integrations.trl")
    pools = {size: Ranks("gloo", size, imports) for size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


def assert_equal(processes, folder, make, world_size, ring, settings, given=None, *, alone=1, evaluates=True):
    """The ranks' results are those of trl's own trainer on `alone` ranks, with as many rows in a step."""
    given, rings = given or {}, world_size // ring
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1, **settings}
    whole = {**settings, "per_device_train_batch_size": settings["per_device_train_batch_size"] * rings // alone}
    figures, changes, (first, last) = processes[alone].run(
        alone, trained, make, 0, f"{folder}/one", whole, given, evaluates, timeout=180
    )[0]
    results = processes[world_size].run(world_size, trained, make, ring, f"{folder}/ring", settings, given, evaluates, timeout=180)
    assert [len(logs) for logs in results[0][0]] == [len(logs) for logs in figures]
    for found, expected in zip(results[0][0], figures, strict=True):
        assert found == pytest.approx(expected, rel=5e-5, abs=5e-5)
    for _, own, losses in results:
        assert losses[0] == losses[1] == 0.0 or losses[0] != losses[1]
        if make is not sft:  # whose loss of an evaluation is the mean of batches' means in trl
            assert losses == pytest.approx((first, last), rel=1e-5, abs=1e-6)
        for name, expected in changes.items():
            assert expected.abs().max() > 1e-5
            torch.testing.assert_close(own[name], expected, rtol=0, atol=1e-4 * expected.abs().max().item() + 2e-7, msg=name)
    return results


SFT = {
    "padded": (2, 2, {}),
    "padded, three ranks, two epochs": (3, 3, dict(max_steps=-1, num_train_epochs=2)),
    "packed, three ranks": (3, 3, dict(packing=True, max_length=60)),
    "packed without bounds": (2, 2, dict(packing=True, max_length=60, packing_strategy="wrapped")),
    "without padding": (2, 2, dict(padding_free=True, max_length=None)),
    "smoothed labels": (3, 3, dict(label_smoothing_factor=0.2)),
    "dft, a rank's own mean": (2, 2, dict(loss_type="dft", average_tokens_across_devices=False, gradient_checkpointing=False)),
    "two rings": (4, 2, {}),
}


@pytest.mark.parametrize("case", SFT.values(), ids=SFT.keys())
def test_fine_tuning_equals_one_process(processes, tmp_path, case):
    assert_equal(processes, tmp_path, sft, *case)


@pytest.mark.parametrize(("world_size", "ring"), [(3, 3), (4, 2)])
def test_an_evaluation_is_the_mean_over_all_tokens(processes, tmp_path, world_size, ring):
    results = assert_equal(processes, tmp_path, sft, world_size, ring, dict(per_device_eval_batch_size=2))
    model, total, tokens = make_model(), 0.0, 0
    for row in documents()[:5]:  # on two rings one row is there twice, and counts once
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        tokens += int((labels != -100).sum())
    for _, _, (first, _) in results:
        assert first == pytest.approx(total / tokens, rel=1e-5)


DPO = {
    "sigmoid": (2, 2, {}),
    "ipo, three ranks": (3, 3, dict(loss_type=["ipo"], beta=0.3)),
    "weighted, of part": (2, 2, dict(use_weighting=True, ld_alpha=0.5)),
    "two losses, moving reference": (
        2,
        2,
        dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], sync_ref_model=True, ref_model_sync_steps=1),
    ),
    "two rings": (4, 2, dict(gradient_accumulation_steps=1)),
}


@pytest.mark.parametrize("case", DPO.values(), ids=DPO.keys())
def test_preferences_equal_one_process(processes, tmp_path, case):
    assert_equal(processes, tmp_path, dpo, *case)


GRPO = {
    "dapo": (2, 2, {}, True, 1),
    "grpo with a reference, reused": (3, 3, dict(beta=0.1, loss_type="grpo", num_iterations=2), True, 1),
    "two rings, entropy": (4, 2, dict(loss_type="dr_grpo", entropy_coef=0.1), True, 2),
    "two rings, steps per generation": (4, 2, dict(steps_per_generation=4, gradient_accumulation_steps=1), True, 2),
    "generated around the ring": (2, 2, dict(temperature=0.7), False, 1),
}


@pytest.mark.parametrize("case", GRPO.values(), ids=GRPO.keys())
def test_rewards_equal_one_process_a_ring(processes, tmp_path, case):
    world_size, ring, settings, has_rollout, alone = case
    make_model().save_pretrained(tmp_path / "model")
    settings = {"per_device_train_batch_size": 4, "num_generations": 2, **settings}
    given = {"rollout_func": rollout} if has_rollout else {}
    settings = {"per_device_eval_batch_size": 2, **settings}
    evaluates = "beta" in settings  # the loss of an evaluation is 0 without a reference
    assert_equal(processes, tmp_path, grpo, world_size, ring, settings, given, alone=alone, evaluates=evaluates)


REFUSED = {
    "args is missing": (sft, {}, dict(args=None)),
    "neftune_noise_alpha is 5": (sft, dict(neftune_noise_alpha=5), {}),
    "use_liger_kernel is True": (sft, dict(use_liger_kernel=True), {}),
    "activation_offloading is True": (sft, dict(activation_offloading=True), {}),
    "auto_find_batch_size is True": (sft, dict(auto_find_batch_size=True), {}),
    "include_num_input_tokens_seen is 'all'": (sft, dict(include_num_input_tokens_seen="all"), {}),
    "dispatch_batches is True": (sft, dict(accelerator_config=dict(dispatch_batches=True)), {}),
    "label_smoothing_factor is 0.1 and loss_type 'dft'": (sft, dict(label_smoothing_factor=0.1, loss_type="dft"), {}),
    "compute_metrics is given": (sft, {}, dict(compute_metrics=len)),
    "compute_loss_func is given": (sft, {}, dict(compute_loss_func=len)),
    "peft_config is given": (sft, {}, dict(peft_config=object())),
    "processing_class is missing": (sft, {}, dict(processing_class=None)),
    "precompute_ref_log_probs is True": (dpo, dict(precompute_ref_log_probs=True), {}),
    "use_vllm is True": (grpo, dict(use_vllm=True), {}),
    "log_completions is True": (grpo, dict(log_completions=True), {}),
    "tools is given": (grpo, {}, dict(tools=[len])),
}


@patch.dict(os.environ)
def refusals(group, folder):
    """The message of each refused case on this rank, and of models that are not attached as they must be."""
    act_as_launched()
    from ringattn.integrations import trl as kinds

    messages = {}
    attached, fixed = make_model(), make_model()
    attach(attached, group=group)
    attach(fixed, group=group, layout=ra.zigzag(12, dist.get_world_size(group)))
    cases = {name: (attached, *case) for name, case in REFUSED.items()}
    cases |= {"is not attached": (make_model(), sft, {}, {}), "was attached with": (fixed, sft, {}, {})}
    cases |= {
        "scale_rewards is 'batch'": (attached, grpo, dict(scale_rewards="batch"), {}),
        "num_generations is 32": (attached, grpo, dict(num_generations=32), {}),
    }
    for name, (model, make, settings, given) in cases.items():
        settings = {**COMMON, "per_device_train_batch_size": 8, **settings}
        try:
            make(kinds, model, settings, folder, **{"processing_class": make_tokenizer(), **given})
        except (ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_be_honoured_is_refused_by_name(processes, tmp_path):
    for found in processes[2].run(2, refusals, str(tmp_path), timeout=180):
        for name, message in found.items():
            assert name in message
        expected = {*REFUSED, "is not attached", "was attached with", "scale_rewards is 'batch'", "num_generations is 32"}
        assert found.keys() == expected


def called_whole(group):
    """Calls with whole sequences, padded on the left, on the right and on both sides: log-probabilities and gradients, and refusals."""
    from trl.trainer.utils import add_fused_lm_head

    from ringattn.integrations.huggingface_inputs import CACHES
    from ringattn.integrations.huggingface_whole import WholeCalls

    model, alone = make_model(), make_model()
    for one in (model, alone):
        add_fused_lm_head(one, outputs=("log_probs", "entropy"))
    attach(model, group=group)
    WholeCalls(model, model.ringattn)
    calls = WholeCalls(model, model.ringattn)  # takes the place of the other
    size = dist.get_world_size(group)
    for spans, width in [([(0, 19), (3, 17), (7, 19)], 19), ([(1, 3)], 3)]:
        tokens = torch.randint(2, VOCAB, (len(spans), width), generator=torch.Generator().manual_seed(3))
        at = torch.arange(width)
        mask = torch.stack([(at >= a) & (at < b) for a, b in spans]).long()
        labels = torch.where((mask == 1) & (at > torch.tensor([a for a, _ in spans])[:, None]), tokens, -100)
        out = model(input_ids=tokens, attention_mask=mask, labels=labels, fused_lm_head=True)
        weights = torch.rand(out.log_probs.shape, generator=torch.Generator().manual_seed(4))
        model.zero_grad()
        alone.zero_grad()
        (out.log_probs * weights).sum().backward()
        for row, (a, b) in enumerate(spans):
            one = alone(input_ids=tokens[row : row + 1, a:b], labels=labels[row : row + 1, a:b], fused_lm_head=True)
            expected = torch.zeros(width - 1)
            expected[a : b - 1] = one.log_probs[0].detach()
            torch.testing.assert_close(out.log_probs[row].detach(), expected, rtol=0, atol=2e-6)
            (one.log_probs[0] * weights[row, a : b - 1]).sum().backward()
        assert torch.equal(out.label_mask, labels[:, 1:] != -100)
        largest = max(p.grad.abs().max().item() for p in alone.parameters())
        for p, expected in zip(model.parameters(), alone.parameters()):
            summed = p.grad.clone()
            dist.all_reduce(summed, group=group)
            torch.testing.assert_close(summed / size, expected.grad, rtol=0, atol=4e-6 * largest)
    rank = dist.get_rank(group)
    whole = dict(input_ids=tokens, labels=tokens, fused_lm_head=True)
    hole = torch.tensor([[1, 0, 1]])
    refused = {
        "different batches": {**whole, "input_ids": tokens + (rank == 0)},
        "between others": {**whole, "attention_mask": hole},
        "first token after padding": {**whole, "attention_mask": torch.tensor([[0, 1, 1]])},
        "logits of whole sequences": {"input_ids": tokens},
        "inputs_embeds is given": {**whole, "inputs_embeds": torch.zeros(1, 3, 16)},
        "router_aux_loss_coef=0.0": {**whole, "output_router_logits": True},
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            model(**call)
    for name in CACHES:
        assert calls._enter(model, (), {"input_ids": tokens, name: object()}) is None
        calls._leave(model, (), None)
    detach(model)
    return model(input_ids=tokens).logits.shape


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_with_whole_sequences(processes, world_size):
    assert processes[world_size].run(world_size, called_whole) == [(1, 3, VOCAB)] * world_size
