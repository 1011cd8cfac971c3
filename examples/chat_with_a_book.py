"""Read a book once into a cache that lies on all ranks, then answer questions about it. What differs from one GPU is marked "ring".

torchrun --nproc-per-node 2 examples/chat_with_a_book.py     # a tiny model with random weights: on GPUs over NCCL, else over gloo
torchrun --nproc-per-node 8 examples/chat_with_a_book.py --model path/of/a/model --text book.txt --ask "Who is the captain?" --ask "Why?"

Each rank computes the keys and values of its part of the book, which stay in pages on all ranks. Then every rank runs the model on the
newest tokens, and attention reads the pages of all ranks. After an answer the cache is cropped back to the book.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation import BaseStreamer

from ringattn.integrations.generation import RingCache
from ringattn.integrations.huggingface import attach


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Clock(BaseStreamer):
    """When `generate` gave the prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder of a model with its tokenizer (a tiny one with random weights, of bytes)")
parser.add_argument("--text", type=Path, help="the book (Python's language reference)")
parser.add_argument("--characters", type=int, help="of the book (all; without --model and --text 3000)")
parser.add_argument("--ask", action="append", help="a question; give it several times")
parser.add_argument("--answer-tokens", type=int, default=32, help="the most of an answer (32)")
options = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if options.model is None:
    torch.manual_seed(0)  # ring: the same weights on every rank
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    tokenizer, model = (
        Bytes(),
        LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=1 << 20, eos_token_id=None, **sizes)),
    )
else:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
model = model.to(device).eval()
attach(model)  # ring

text = "\n\n".join(topics[name] for name in sorted(topics)) if options.text is None else options.text.read_text(encoding="utf-8")
characters = 3000 if options.characters is None and options.model is None and options.text is None else options.characters
book = torch.tensor([tokenizer.encode(text[:characters])], device=device)  # the whole book, the same on every rank
asked = options.ask or ["What is an assignment?", "What does a backslash do?"]
endings = [
    torch.tensor([tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False)], device=device)
    for question in asked
]
room = book.shape[1] + max(ending.shape[1] for ending in endings) + options.answer_tokens
cache = RingCache(model, tokens=room)  # ring: pages on all ranks

began = time.perf_counter()
with torch.no_grad():
    model(book, past_key_values=cache, logits_to_keep=1)
if dist.get_rank() == 0:
    seconds = time.perf_counter() - began
    print(
        f"read {book.shape[1]:,} tokens on {dist.get_world_size()} ranks in {seconds:.2f} s, {book.shape[1] / seconds:,.0f} tokens/s"
    )
for question, ending in zip(asked, endings):
    clock = Clock()
    prompt = torch.cat([book, ending], 1)
    answer = model.generate(
        prompt, past_key_values=cache, max_new_tokens=options.answer_tokens, do_sample=False, streamer=clock
    )  # the same on every rank
    if dist.get_rank() == 0:
        first, rest = clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]
        rate = f", then {(len(clock.times) - 2) / rest:.1f} tokens/s" if len(clock.times) > 2 else ""
        print(f"\n{question}\n{tokenizer.decode(answer[0, prompt.shape[1] :].tolist())!r}")
        print(f"first token after {1000 * first:.0f} ms{rate}")
    cache.crop(book.shape[1] - cache.get_seq_length())  # forget the question
dist.destroy_process_group()
