"""SGLang's engine on CPUs, with an attention backend made of ringattn's functions: `python sglang_on_cpus.py MODEL BACKEND RESULT`.

SGLang's kernels for CPUs are not on PyPI, and torchvision's are those for GPUs. Plain models run without either, but importing SGLang
needs their names: `stand_in` gives them. `plug` is a plugin of SGLang, for all of its processes.
"""

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

import torch

TOKENS = 12  # that a sequence is answered with
PROMPTS = (5, 70, 200)
_OPERATORS = "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward ps_roi_pool"
_OPERATORS += " _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"
_libraries = []


class _Absent(types.ModuleType):
    """A module whose functions are not there: calling one is an error."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_, **__):
            raise RuntimeError(f"{self.__name__}.{name} is not on this machine")

        return absent


def stand_in():
    """Names that importing SGLang needs."""
    if "sgl_kernel" in sys.modules:
        return
    module = sys.modules["sgl_kernel"] = _Absent("sgl_kernel")
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True), []
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS.split():
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)


def plug():
    """Put the backend "ringattn" into SGLang's registry."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("ringattn")(make_backend)


def make_backend(runner):
    """SGLang calls it with its ModelRunner."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    import ringattn as ra

    class RingBackend(AttentionBackend):
        """Partials of the two halves of a sequence's keys, merged: what two ranks of decode context parallelism would compute."""

        def init_forward_metadata(self, batch):
            pass

        def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
            return self._forward(q, k, v, layer, batch, [1] * len(batch.seq_lens), save_kv_cache)

        def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True):
            return self._forward(q, k, v, layer, batch, batch.extend_seq_lens.tolist(), save_kv_cache)

        def _forward(self, q, k, v, layer, batch, new, save_kv_cache):
            pool = runner.token_to_kv_pool
            if save_kv_cache:
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            q, out = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), []
            lengths = batch.seq_lens.tolist()
            for row, length, own in zip(batch.req_pool_indices.tolist(), lengths, q.split(new), strict=True):
                slots = runner.req_to_token_pool.req_to_token[row, :length].long()
                parts = [
                    ra.attend(
                        own[None],
                        keys[slots[half]][None],
                        values[slots[half]][None],
                        q_positions=torch.arange(length - len(own), length),
                        k_positions=half,
                        softmax_scale=layer.scaling,
                    )
                    for half in torch.arange(length).split(-(-length // 2))
                ]
                part = parts[0] if len(parts) == 1 else ra.merge(*parts)
                out.append(ra.finish(part, q.dtype)[0])
            print("ringattn's backend", len(lengths), max(new), flush=True)
            return torch.cat(out).flatten(1)

    return RingBackend()


def make_model(folder):
    """A small Llama."""
    import transformers

    sizes = dict(vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    config = transformers.LlamaConfig(**sizes, intermediate_size=192, initializer_range=0.3, max_position_embeddings=256)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def main():
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")
    stand_in()
    import sglang

    model, backend, result = sys.argv[1:]
    if not Path(model).exists():
        make_model(model)
    plain = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True, disable_overlap_schedule=True)
    engine = sglang.Engine(model_path=model, attention_backend=backend, max_total_tokens=4096, mem_fraction_static=0.05, **plain)
    asked = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    prompts = [[(7 * i * j + 3) % 128 for i in range(n)] for j, n in enumerate(PROMPTS, 1)]
    answers = engine.generate(input_ids=prompts, sampling_params=asked, return_logprob=True, logprob_start_len=0)
    engine.shutdown()
    report = dict(tokens=[answer["output_ids"] for answer in answers], logprobs=[])
    for answer in answers:
        found = answer["meta_info"]["input_token_logprobs"][1:] + answer["meta_info"]["output_token_logprobs"]
        report["logprobs"].append([x[0] for x in found])
    Path(result).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
elif os.environ.get("SGLANG_USE_CPU_ENGINE"):
    # in a process that SGLang starts
    stand_in()
