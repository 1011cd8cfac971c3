"""The command line of `finetune_long_document.py`: its settings, checked before any rank is started."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from .manifest import LAST, check_resumable
from .peers import PEERS

LAYOUTS = ("zigzag", "striped", "contiguous")
WRAPPERS = ("fsdp2", "ddp", "deepspeed", "none")
ALL = -1  # of --offload without a number
# weights that are whole on every rank between steps
WHOLE = ("ddp", "none")
# of matmuls and attention, and of the weights under them
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
WEIGHTS = {"bfloat16": torch.float32, "float32": torch.float32, "float64": torch.float64}

# Llama 3 (Dubey et al. 2024, table 3), and Llama 3.2 1B and Qwen3.5's layers in 1.5B with an output embedding of its own: random weights,
# made on the device
SHAPES = {
    "8b": dict(vocab=128256, hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8),
    "1b": dict(vocab=128256, hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8),
    "1.5b-hybrid": dict(vocab=32768, hidden=2048, intermediate=6144, layers=24, heads=8, kv_heads=2),
    "1.5b-full": dict(vocab=32768, hidden=2048, intermediate=6144, layers=24, heads=8, kv_heads=2),
}
# shapes that are Qwen3.5's: one of so many layers is attention, the others are gated delta rules
QWEN = {"1.5b-hybrid": 4, "1.5b-full": 1}


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on; see `parse` for what each means."""

    text: str | None
    out: str
    beside: str | None
    resume: str | None
    model: str
    shape: str | None
    device: str
    ranks: int
    wrapper: str
    zero: int | None
    attention: str
    layout: str
    dtype: str
    recompute: bool | None
    offload: int
    mlp_tile: int
    deterministic: bool
    tokens: int
    heldout: float
    steps: int
    rehearse: int
    save_every: int
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    lr: float
    warmup: int
    clip: float
    seed: int
    generate: int
    prompt: str | None
    peak: float | None
    verify: bool
    verify_tokens: int


# by device: sizes for a run of a few minutes
DEFAULTS = {
    "cpu": dict(
        ranks=2, dtype="float32", tokens=2048, steps=100, hidden=128, layers=4, heads=4, kv_heads=2, lr=6e-3, warmup=8,
        verify_tokens=1024,
    ),
    "cuda": dict(
        ranks=None, dtype="bfloat16", tokens=0, steps=100, hidden=1024, layers=12, heads=8, kv_heads=4, lr=6e-4, warmup=20,
        verify_tokens=4096,
    ),
}  # fmt: skip


def parse(argv: list[str] | None = None, description: str | None = None) -> Settings:
    """The settings of a command line. Bad ones end the program with a message, before any rank is started."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", metavar="FILE", help="the document, UTF-8 (default: Python's language reference)")
    add("--out", default="runs/long_document", metavar="DIR", help="folder to write (default: %(default)s)")
    add("--beside", metavar="DIR", help="draw the loss of the finished run in this folder, too")
    add(
        "--resume",
        metavar="DIR|last",
        help="go on from this checkpoint, up to --steps; last: from the newest complete one in --out, or from the start if there is "
        "none yet",
    )
    add("--model", default="tiny", metavar="tiny|DIR|CONFIG.json", help="a model's folder, or its config for random weights")
    add(
        "--shape",
        choices=tuple(SHAPES),
        help="a Llama or Qwen3.5 of this size with random weights made on the device, instead of --model",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    add("--ranks", type=int, help="ranks to start (default: all GPUs, or 2 on a CPU); torchrun's number under torchrun")
    add("--wrapper", choices=WRAPPERS, help="what shards or copies weights (default: none, and fsdp2 with --shape)")
    add(
        "--zero",
        type=int,
        choices=range(4),
        help="DeepSpeed's stage (default: 3): 1 shards optimizer states, 2 gradients, 3 weights too",
    )
    add(
        "--attention",
        choices=("ringattn", *PEERS),
        default="ringattn",
        help="or a peer to compare with (default: %(default)s)",
    )
    add("--layout", choices=LAYOUTS, default="zigzag", help="who holds which tokens (default: %(default)s)")
    add("--dtype", choices=tuple(DTYPES), help="of matmuls and attention; parameters are float32 or wider (default: by device)")
    add("--recompute", action=argparse.BooleanOptionalAction, default=None, help="recompute activations in backward")
    add(
        "--offload",
        type=int,
        nargs="?",
        const=ALL,
        default=0,
        metavar="N",
        help="keep the inputs of N layers (without N: of all), and what attention computed in them, in host memory, and recompute the "
        "rest in backward",
    )
    add("--mlp-tile", type=int, default=0, metavar="N", help="run MLPs and norms over tiles of N tokens (default: whole)")
    add("--deterministic", action="store_true", help="torch's deterministic algorithms: the same bits every time on a GPU too")
    add("--tokens", type=int, help="tokens a step; 0 is the whole document (default: 2048 on a CPU, 0 on GPUs)")
    add(
        "--heldout",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="the document's tail, kept for perplexity (default: %(default)s)",
    )
    add("--steps", type=int, help="training steps in all (default: 100)")
    add(
        "--rehearse",
        type=int,
        default=0,
        metavar="N",
        help="first a pass of N tokens without a step, so that no step has to compile",
    )
    add("--save-every", type=int, default=0, metavar="N", help="a checkpoint every N steps (default: at the end, without --shape)")
    add("--vocab", type=int, help="size of the byte-level BPE (default: 8192)")
    add("--hidden", type=int, help="width of the tiny model (default: 128 on a CPU, 1024 on GPUs)")
    add("--layers", type=int, help="its layers (default: 4 on a CPU, 12 on GPUs)")
    add("--heads", type=int, help="its query heads (default: 4 on a CPU, 8 on GPUs)")
    add("--kv-heads", type=int, help="its key and value heads (default: 2 on a CPU, 4 on GPUs)")
    add("--lr", type=float, help="peak learning rate (default: 6e-3 on a CPU, 6e-4 on GPUs)")
    add("--warmup", type=int, help="steps of linear warm-up; cosine decay to a tenth follows (default: 8 on a CPU, 20 on GPUs)")
    add("--clip", type=float, default=1.0, help="largest norm of the whole gradient (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights, the windows and the sampling (default: %(default)s)")
    add("--generate", type=int, metavar="N", help="tokens to write at the end (default: 48; none with fsdp2 or deepspeed)")
    add("--prompt", help="what they go on from (default: the document, or its last --tokens)")
    add("--peak", type=float, help="FLOP/s a rank that MFU is stated against (default: an H200's bf16, 989e12; none on a CPU)")
    add("--verify", action="store_true", help="compare one step with dense attention in one process, and stop")
    add("--verify-tokens", type=int, metavar="N", help="tokens of that step (default: 1024 on a CPU, 4096 on GPUs)")
    args = parser.parse_args(argv)
    _fill(args, parser)
    _check(args, parser)
    return Settings(**vars(args))


def _fill(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what was not given, by device and by model."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but this torch sees no GPU: use --device cpu")
    if "RANK" in os.environ:
        if args.ranks is not None:
            parser.error("--ranks is given, but torchrun has started the ranks: leave it out")
        args.ranks = int(os.environ["WORLD_SIZE"])
    sizes = [name for name in ("hidden", "layers", "heads", "kv_heads") if getattr(args, name) is not None]
    sizes += ["vocab"] if args.shape and args.vocab is not None else []
    if sizes and (args.shape or args.model != "tiny"):
        parser.error(
            f"--{sizes[0].replace('_', '-')} is {getattr(args, sizes[0])}, but "
            + (f"--shape {args.shape}" if args.shape else f"--model {args.model}")
            + " has a size of its own: leave it out"
        )
    args.vocab = 8192 if args.vocab is None else args.vocab
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.ranks = torch.cuda.device_count() if args.ranks is None else args.ranks
    args.intermediate = -(-args.hidden * 8 // 3 // 64) * 64
    if args.shape is not None:
        if args.model != "tiny":
            parser.error(f"--shape is {args.shape} and --model {args.model}: give one of them")
        vars(args).update(SHAPES[args.shape])
    if args.wrapper is None:
        args.wrapper = "none" if args.shape is None or args.ranks == 1 else "fsdp2"
    if args.generate is None:
        args.generate = 0 if args.wrapper not in WHOLE or args.shape or args.attention != "ringattn" else 48
    if args.zero is not None and args.wrapper != "deepspeed":
        parser.error(f"--zero is {args.zero} and --wrapper {args.wrapper}: stages are those of --wrapper deepspeed")
    if args.zero is None and args.wrapper == "deepspeed":
        args.zero = 3
    if args.peak is None and args.device == "cuda":
        args.peak = 989e12
    args.warmup = min(args.warmup, args.steps)


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    least = dict(ranks=1, tokens=0, steps=1, save_every=0, vocab=257, hidden=2, layers=1, heads=1, kv_heads=1, warmup=0, mlp_tile=0)
    for name, bound in dict(least, rehearse=0, generate=0, verify_tokens=2, lr=0).items():
        if not getattr(args, name) >= bound:  # nor is NaN
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be at least {bound}")
    if args.device == "cuda" and "RANK" not in os.environ and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks is {args.ranks}, but this host has {torch.cuda.device_count()} GPUs: one rank a GPU")
    for name in ("tokens", "rehearse", "verify_tokens"):
        if 0 < getattr(args, name) < 2 * args.ranks:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: {args.ranks} ranks need {2 * args.ranks} or more")
    if not args.clip > 0:
        parser.error(f"--clip is {args.clip}, but must be above 0, where every gradient would become 0: give inf for no clipping")
    if args.lr == float("inf"):
        parser.error("--lr is inf, by which the weights would be no numbers")
    if not 0 <= args.seed < 1 << 40:
        parser.error(f"--seed is {args.seed}, but must be from 0 to 2^40 - 1")
    if args.prompt is not None and not args.generate:
        parser.error(f"--prompt is {args.prompt!r}, but no tokens are written: give --generate, or leave it out")
    if args.peak is not None and not args.peak > 0:
        parser.error(f"--peak is {args.peak}, but must be above 0: FLOP/s a rank")
    if args.verify and args.shape is not None:
        parser.error(
            f"--verify runs a step whole on one rank, and --shape {args.shape} has no weights before it is wrapped: use --model"
        )
    if args.verify and args.attention != "ringattn":
        parser.error(
            f"--verify compares ring attention with dense attention, and --attention is {args.attention}: leave one of them out"
        )
    if not 0 <= args.heldout < 1:
        parser.error(f"--heldout is {args.heldout}, but must be from 0 to less than 1: a share of the document")
    if args.heads % args.kv_heads:
        parser.error(f"--heads is {args.heads} and --kv-heads {args.kv_heads}: the first must be a multiple of the second")
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden is {args.hidden}, but must be a multiple of twice --heads ({args.heads}): heads of even size")
    if args.hidden // args.heads > 256:
        parser.error(f"--hidden {args.hidden} over --heads {args.heads} makes heads of more than 256: use more heads")
    if args.generate and (args.wrapper not in WHOLE or args.attention != "ringattn"):
        parser.error(
            f"--generate is {args.generate}, but tokens are written with --wrapper none or ddp and --attention ringattn only"
        )
    if args.layout != PEERS.get(args.attention, args.layout):
        parser.error(f"--attention {args.attention} needs --layout {PEERS[args.attention]}, not {args.layout}: it knows no other")
    if args.attention == "context-parallel" and args.device == "cpu":
        parser.error("--attention is context-parallel, for which torch has no kernels on CPUs: use ulysses-sdpa there")
    if args.offload < ALL:
        parser.error(f"--offload is {args.offload}, but must be at least 0: a number of layers")
    if args.model == "tiny" and args.offload > args.layers:
        parser.error(f"--offload is {args.offload}, but the model has {args.layers} layers: give that or less")
    if args.offload and (args.recompute is False or args.attention != "ringattn"):
        parser.error("--offload is for --attention ringattn whose activations are recomputed: leave --no-recompute and peers out")
    if args.wrapper == "deepspeed":
        _check_deepspeed(args, parser)
    _check_files(args, parser)


def _check_files(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if Path(args.out).exists() and not Path(args.out).is_dir():
        parser.error(f"--out is {args.out}, which is a file: give a folder, which need not exist")
    if args.text is not None:
        if not Path(args.text).is_file():
            parser.error(f"--text is {args.text}, which is not a file")
        try:
            if not Path(args.text).read_text(encoding="utf-8"):
                parser.error(f"--text is {args.text}, which is empty")
        except UnicodeDecodeError as error:
            parser.error(f"--text is {args.text}, which is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}")
    if args.beside is not None and not (Path(args.beside) / "figures.json").is_file():
        parser.error(f"--beside is {args.beside}, which lacks figures.json: give the --out of a run that has ended")
    if args.model != "tiny" and not Path(args.model).exists():
        parser.error(f"--model is {args.model}, which is neither tiny nor a folder or config file here")
    if Path(args.model).is_dir() and args.resume in (None, LAST) and not (Path(args.model) / "tokenizer.json").is_file():
        parser.error(
            f"--model is {args.model}, whose weights know the tokens of a tokenizer.json that is not there: save it with "
            "AutoTokenizer's save_pretrained, or give config.json alone for random weights"
        )
    if args.model != "tiny":
        from .model import check_model

        try:
            check_model(args)
        except (ValueError, OSError) as error:
            parser.error(f"--model is {args.model}, which cannot be trained: {error}")
    if args.resume is not None:
        try:
            check_resumable(args)
        except (ValueError, OSError) as error:
            parser.error(str(error))


def _check_deepspeed(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        parser.error("--wrapper is deepspeed, which is not installed: pip install 'ringattn[deepspeed]', or use --wrapper fsdp2")
    if args.dtype == "float64":
        parser.error("--dtype is float64 and --wrapper deepspeed, which adds gradients in fp32: use --wrapper fsdp2")
    if args.rehearse:
        parser.error(f"--rehearse is {args.rehearse}, but --wrapper deepspeed takes a step after every backward pass: leave it out")
    for option, given in (("--save-every", args.save_every), ("--resume", args.resume)):
        if given:
            parser.error(
                f"{option} is {given}, but --wrapper deepspeed has no checkpoints here: DeepSpeed's are pickled, and this program "
                "neither writes nor reads pickles; use --wrapper fsdp2, whose shards are safetensors"
            )
