"""What transformers' Trainer would ignore or distort around a ring is refused by name, or honoured; its steps are in test_accelerate.py."""

import importlib.util

import pytest
import torch

from ringattn.integrations.huggingface import attach

# `make test` installs it, except on a GPU host without network
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")

ROWS = [dict(input_ids=torch.arange(i, i + 8), labels=torch.arange(i, i + 8)) for i in range(7)]


def make_trainer(folder, given=None, older=None, **settings):
    """A RingTrainer of a tiny model in one process. older: settings that only other versions of transformers have."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from ringattn.integrations.trainer import RingTrainer

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=37, **sizes))
    attach(model)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        **settings,
    )
    vars(arguments).update(older or {})
    return RingTrainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS, **(given or {}))


@pytest.fixture(autouse=True)
def accelerate_forgets():
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class Sharding:
    """A ParallelismConfig, as accelerate has it."""

    cp_size = 2


REFUSED = {
    "neftune_noise_alpha is 5.0": dict(neftune_noise_alpha=5.0),
    "use_liger_kernel is True": dict(older=dict(use_liger_kernel=True)),
    "auto_find_batch_size is True": dict(auto_find_batch_size=True),
    "dataloader_in_order is False": dict(older=dict(dataloader_in_order=False)),
    "train_sampling_strategy is 'group_by_length'": dict(older=dict(train_sampling_strategy="group_by_length")),
    "train_sampling_strategy is 'batch_rebalance'": dict(older=dict(train_sampling_strategy="batch_rebalance")),
    "group_by_length is True": dict(older=dict(group_by_length=True)),
    "include_tokens_per_second is True": dict(older=dict(include_tokens_per_second=True)),
    "split_batches is True in accelerator_config": dict(accelerator_config=dict(split_batches=True)),
    "dispatch_batches is True in accelerator_config": dict(accelerator_config=dict(dispatch_batches=True)),
    "even_batches is False in accelerator_config": dict(accelerator_config=dict(even_batches=False)),
    "use_seedable_sampler is False in accelerator_config": dict(accelerator_config=dict(use_seedable_sampler=False)),
    "non_blocking is True in accelerator_config": dict(accelerator_config=dict(non_blocking=True)),
    "cp_size is 2 in parallelism_config": dict(older=dict(parallelism_config=Sharding())),
    "compute_metrics is given": dict(given=dict(compute_metrics=len)),
    "preprocess_logits_for_metrics is given": dict(given=dict(preprocess_logits_for_metrics=max)),
}


@pytest.mark.parametrize(("message", "asked"), REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, message, asked):
    with pytest.raises(ValueError, match=f"^{message}, but "):
        make_trainer(tmp_path, **asked)


def test_predictions_are_refused_and_their_loss_is_not(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="prediction_loss_only is False, but"):
        trainer.predict(ROWS)
    trainer.args.prediction_loss_only = True
    found = trainer.predict(ROWS)
    assert found.predictions is None
    assert found.metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)


def test_settings_of_loaders_are_honoured(tmp_path):
    asked = dict(
        dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=3, dataloader_drop_last=True
    )
    trainer = make_trainer(tmp_path, older=dict(train_sampling_strategy="sequential"), **asked)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor, loader.drop_last) == (1, True, 3, True)
    trainer.args.dataloader_num_workers, trainer.args.dataloader_persistent_workers = 0, False
    trainer.args.dataloader_prefetch_factor = None
    order = [batch["input_ids"][:, 0].tolist() for batch in trainer.get_train_dataloader()]
    assert order == [[0, 1], [2, 3], [4, 5]], "in order, without the last row, which fills no batch"
