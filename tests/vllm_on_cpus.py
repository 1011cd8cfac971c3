"""vLLM's engine on CPUs with ringattn's backend, as a program of its own: `python vllm_on_cpus.py MODEL OPTIONS RESULT`.

vLLM's platform for CPUs takes CPU_ATTN whatever it is asked for, and no Triton kernel runs there. So `plug`, a plugin of vLLM, registers
ringattn's backend in the place of CPU_ATTN, and deals tokens to ranks as vLLM's Triton kernel does: what vLLM has for CPUs refuses
context parallelism.
"""

import json
import os
import sys
from pathlib import Path

import torch

TOKENS = 12  # that a sequence is answered with
PROMPTS = (5, 70, 200)


class Report:
    """Methods that vLLM adds to its workers."""

    def implementations(self):
        layers = self.model_runner.compilation_config.static_forward_context.values()
        return sorted({type(layer.impl).__name__ for layer in layers})


def plug():
    from vllm.utils import cpu_triton_utils

    from ringattn.integrations.vllm import register

    register("CPU_ATTN")
    cpu_triton_utils._compute_slot_mapping_kernel_impl = slot_mapping


def slot_mapping(tokens, padded, starts, positions, blocks, _, slots, block_size, ranks, rank, interleave, nowhere, *__):
    """Writes to `slots` where this rank keeps each token of a step; `nowhere` for tokens of other ranks, and for padding."""
    slots[tokens:padded] = nowhere
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        dealt = positions[begin:end] // interleave
        own = dealt // ranks * interleave + positions[begin:end] % interleave
        slot = blocks[row].long()[own // block_size] * block_size + own % block_size
        slots[begin:end] = torch.where(dealt % ranks == rank, slot, nowhere)


def main():
    # the engine, and with one rank its worker, in this process
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams

    model, options, result = sys.argv[1:]
    sizes = dict(max_model_len=256, block_size=32, max_num_batched_tokens=64, max_num_seqs=4, kv_cache_memory_bytes=1 << 24)
    plain = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, worker_extension_cls="vllm_on_cpus.Report")
    llm = LLM(model, **sizes, **plain, **json.loads(options))
    prompts = [dict(prompt_token_ids=[(7 * i * j + 3) % 128 for i in range(n)]) for j, n in enumerate(PROMPTS, 1)]
    report = dict(implementations=llm.collective_rpc("implementations"), tokens=[], logprobs=[])
    # the second time, blocks of the prompts are found in the cache
    for prompt_logprobs in (0, None):
        asked = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=prompt_logprobs
        )
        for answer in llm.generate(prompts, asked, use_tqdm=False):
            own = answer.outputs[0]
            found = (answer.prompt_logprobs or [])[1:] + own.logprobs
            report["tokens"].append(list(own.token_ids))
            report["logprobs"].append([next(iter(x.values())).logprob for x in found])
    Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
