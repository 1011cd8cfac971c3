"""GRPO with verl's engine around a ring, on a toy reward. transformers' generate takes the place of an inference server.

torchrun --nproc-per-node 2 examples/train_verl.py     # on GPUs over NCCL, else on the CPU over gloo; all ranks are one ring
"""

import os
import tempfile
from functools import partial

import torch

os.environ.setdefault("VERL_PLATFORM", "nvidia" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "ringattn.integrations.verl")  # verl finds an installed ringattn by itself
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

STEPS, PROMPTS, SAMPLES, LONGEST, VOCAB = 8, 4, 8, 24, 32
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.get_device_module(device).set_device(device)
torch.manual_seed(0)
sizes = dict(hidden_size=24, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1)
rollout = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes)).to(device)
folder = tempfile.TemporaryDirectory()
rollout.save_pretrained(folder.name)  # each rank has a copy
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
fsdp = FSDPEngineConfig(ulysses_sequence_parallel_size=dist.get_world_size(), use_torch_compile=False)  # the ring's size
actor = FSDPActorConfig(strategy="ringattn", fsdp_config=fsdp, rollout_n=SAMPLES, use_dynamic_bsz=True)
model, optimizer = HFModelConfig(path=folder.name, load_tokenizer=False), FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS)
engine = EngineRegistry.new("language_model", actor.strategy, model, actor.engine, optimizer, CheckpointConfig())
engine.initialize()
jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
for step in range(STEPS):
    rollout.load_state_dict({name: weight.detach() for name, weight in engine.get_per_tensor_param()[0]})
    torch.manual_seed(step)  # the ranks of a ring train on the same samples
    prompts = torch.randint(2, VOCAB, (PROMPTS, 5), device=device).repeat_interleave(SAMPLES, 0)
    found = rollout.generate(prompts, attention_mask=prompts > 0, do_sample=True, top_k=0, max_new_tokens=LONGEST)[:, 5:]
    answers = [x[: int((x == 1).nonzero()[0]) + 1] if (x == 1).any() else x for x in found]  # of any lengths
    rewards = torch.stack([(x % 2 == 0).float().mean() for x in answers])  # for even tokens
    whole, ones = [torch.cat(pair) for pair in zip(prompts, answers)], [torch.ones_like(x) for x in answers]
    batch = dict(input_ids=jagged(whole), position_ids=jagged([torch.arange(len(x), device=device) for x in whole]))
    batch |= dict(prompts=jagged(list(prompts)), responses=jagged(answers), response_mask=jagged(ones), loss_mask=jagged(ones))
    options = dict(temperature=1.0, use_dynamic_bsz=True, max_token_len_per_gpu=256, global_batch_size=len(answers))
    with engine.eval_mode():
        known = engine.infer_batch(get_tensordict(batch, options))["model_output"]["log_probs"].unbind()
    groups = torch.arange(PROMPTS).repeat_interleave(SAMPLES).tolist()
    scores, _ = compute_grpo_outcome_advantage(rewards[:, None].clone(), torch.ones_like(rewards)[:, None], groups)
    advantages = jagged([score * one for score, one in zip(scores, ones)])
    batch |= dict(old_log_probs=jagged([x[4:-1] for x in known]), advantages=advantages)
    with engine.train_mode():
        engine.train_batch(get_tensordict(batch, options), partial(ppo_loss, actor))
    if dist.get_rank() == 0:
        print(f"step {step}: mean reward {rewards.mean():.4f}, {len(torch.cat(answers))} tokens")
dist.destroy_process_group()
