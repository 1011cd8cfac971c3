"""`finetune_long_document.py` at toy size, with ranks of its own and with torchrun's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from ringattn.training.offload import HostMemory
from tests.examples.programs import EXAMPLES, PROGRAM, SHORT, TOY, call, figures, needs_deepspeed, run


def test_a_run_learns_and_writes_its_files(finished):
    out, printed = finished
    result = figures(out)
    losses = result["losses"]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 1.2 * math.log(300)
    assert result["tokens_per_second"] > 0
    assert result["peak_memory_gib_per_rank"] > 0
    assert result["settings"]["ranks"] == 2
    assert result["mfu"] is None, "no peak is stated for a CPU"
    assert 1 < result["heldout_perplexity"] < 300
    assert result["heldout_tokens"] == int(0.05 * result["tokens"])
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["generated"] in printed
    assert "\r" not in printed, "it goes to a file"
    assert f"training: step 4 of 4, loss {losses[-1]:.3f}, " in printed
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-000002", "checkpoint-000004"}
    assert {path.name for path in (out / "checkpoint-000002").iterdir()} == {
        "rank-00000.safetensors",
        "manifest.json",
        "tokenizer.json",
    }


def test_lines_of_progress_come_every_few_seconds(program, monkeypatch, capsys):
    clock = iter([0.0, 1.0, 4.9, 5.0, 9.0, 9.5])
    monkeypatch.setattr(sys.modules["finetune.progress"], "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = program.Progress(2, 8, hidden=False)
    hidden = program.Progress(2, 8, hidden=True)
    for number in range(3, 9):
        progress.step(number, f"loss {number}")
    progress.close()
    hidden.close()
    printed = capsys.readouterr().err
    assert printed.splitlines() == [f"training: step {number} of 8, loss {number}" for number in (3, 6, 8)]


@pytest.mark.thorough
def test_under_torchrun_another_number_of_ranks_has_the_same_losses(finished, text, tmp_path):
    run(PROGRAM, *TOY, "--text", text, "--out", tmp_path, "--layout", "striped", ranks=3)
    result = figures(tmp_path)
    assert result["settings"]["ranks"] == 3
    assert result["losses"] == pytest.approx(figures(finished[0])["losses"], rel=2e-5)


@needs_deepspeed
@pytest.mark.thorough
def test_deepspeed_gives_the_same_losses(finished, text, tmp_path):
    printed = run(PROGRAM, *TOY[:-2], "--text", text, "--out", tmp_path, "--wrapper", "deepspeed")
    assert "wrapper deepspeed, ZeRO 3" in printed
    result, other = figures(tmp_path), figures(finished[0])
    for name in ("losses", "gradient_norms", "heldout_perplexity"):
        assert result[name] == pytest.approx(other[name], rel=2e-6)
    for name in ("parameters", "model_flops_a_step"):
        assert result[name] == other[name]
    assert result["generated"] is None
    assert not list(tmp_path.glob("checkpoint-*"))


def shape_steps(wrappers):
    """Two steps of a small shape under each wrapper, ZeRO-3 sharding even the smallest weights: losses, norms, perplexity; facts."""
    sys.path.insert(0, str(EXAMPLES))
    import finetune.deepspeed
    import finetune.settings
    import finetune_long_document as program

    finetune.settings.SHAPES["1b"] = dict(vocab=300, hidden=16, intermediate=24, layers=2, heads=2, kv_heads=1)
    plain = finetune.deepspeed.make_config

    def shard_all(settings):
        config = plain(settings)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    finetune.deepspeed.make_config = shard_all
    tokens = torch.randint(300, (500,), generator=torch.Generator().manual_seed(0))
    found = []
    for options in wrappers:
        # a small norm, that the gradient is clipped
        settings = program.parse(["--device", "cpu", "--shape", "1b", "--tokens", "61", "--clip", "0.3", *options])
        trainer = program.make_trainer(settings, program.build_model(settings, torch.device("cpu")), torch.device("cpu"))
        if "--recompute" in options:
            trainer.model.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.run.train()
        steps = [trainer.step(program.window(tokens, 61, settings, step), 0.01) for step in range(2)]
        facts = dict(
            dtypes={parameter.dtype for parameter in trainer.model.parameters()},
            frequencies={buffer.dtype for buffer in trainer.model.buffers()},
            held=sum(parameter.numel() for parameter in trainer.model.parameters()),
            parts=sum(getattr(parameter, "ds_tensor", parameter).numel() for parameter in trainer.model.parameters()),
        )
        found.append(([number for step in steps for number in step] + [trainer.perplexity(tokens[:70], 61)], facts))
    return found


@pytest.mark.thorough
@needs_deepspeed
def test_a_shape_under_every_stage_of_deepspeed():
    """As without a wrapper; ZeRO-3 has weights between steps in parts only, and bf16 is that of all but the frequencies."""
    stages = [["--wrapper", "deepspeed", "--zero", str(stage)] for stage in range(4)]
    low = [[*stages[number], "--dtype", "bfloat16"] for number in (0, 3)]
    ranks = call(shape_steps, [["--wrapper", "none"], *stages, [*stages[3], "--recompute"], *low], ranks=2)
    for (wanted, whole), *found in ranks:
        for numbers, facts in found[:5]:
            assert numbers == pytest.approx(wanted, rel=3e-6)
            assert facts["dtypes"] == {torch.float32}
        for numbers, facts in found[5:]:
            # losses, whose errors are many tokens' mean, and gradients of weights with 8 bits
            assert numbers[::2] == pytest.approx(wanted[::2], rel=2e-3)
            assert numbers[1::2] == pytest.approx(wanted[1::2], rel=2e-2)
            assert numbers[0] == found[-1][0][0] != wanted[0], "the same bf16 weights in every stage"
            assert facts["dtypes"] == {torch.bfloat16}
        assert all(facts["frequencies"] == {torch.float32} for _, facts in found)
        sharded = [found[3], found[4], found[-1]]
        for one in found:
            held, parts = one[1]["held"], one[1]["parts"]
            assert (held, parts) == ((0, whole["held"] / 2) if one in sharded else (whole["held"], whole["held"]))


@pytest.mark.thorough
def test_a_models_folder_is_trained_with_its_weights(program, text, tmp_path):
    """And so is its config alone, with random ones: another loss."""
    from finetune.files import train_tokenizer

    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=310,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = transformers.Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=2.0)
    model.save_pretrained(tmp_path / "model")
    train_tokenizer(text.read_text(), 300).save(str(tmp_path / "model" / "tokenizer.json"))
    losses = []
    for number, given in enumerate((tmp_path / "model", tmp_path / "model" / "config.json")):
        out = tmp_path / str(number)
        run(
            PROGRAM,
            *SHORT,
            "--text",
            text,
            "--out",
            out,
            "--model",
            given,
            "--wrapper",
            "ddp",
            "--steps",
            1,
        )
        losses.append(figures(out)["losses"][0])
    assert losses[0] > 2 * math.log(310) > 1.5 * losses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_passes(text, tmp_path, dtype):
    check = ["--verify", "--dtype", dtype, "--verify-tokens", 97]
    printed = run(PROGRAM, *TOY, "--text", text, "--out", tmp_path, *check)
    assert "all within bounds" in printed
    assert "FAILED" not in printed
    assert printed.count(" ok") == 12


def test_a_shapes_weights_are_made_on_the_device_and_alike_under_every_wrapper(program, monkeypatch, alone, text, tmp_path):
    import finetune.settings

    tiny = dict(vocab=300, hidden=16, intermediate=24, layers=2, heads=2, kv_heads=1)
    monkeypatch.setitem(finetune.settings.SHAPES, "1b", tiny)
    tokens = torch.randint(300, (500,), generator=torch.Generator().manual_seed(0))
    losses = {}
    for wrapper in ("none", "ddp", "fsdp2"):
        settings = program.parse(["--device", "cpu", "--ranks", "1", "--shape", "1b", "--tokens", "400", "--wrapper", wrapper])
        model = program.build_model(settings, torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        trainer = program.Trainer(settings, model, torch.device("cpu"))
        assert not any(parameter.is_meta for parameter in model.parameters())
        losses[wrapper] = [trainer.step(program.window(tokens, 400, settings, step), 1e-3)[0] for step in range(2)]
    assert losses["none"][0] == pytest.approx(math.log(300), rel=0.02)
    assert losses["ddp"] == losses["none"]
    assert losses["fsdp2"] == pytest.approx(losses["none"], rel=1e-6)


def test_model_flops_are_counted(program):
    """By hand: 2 layers of 4 heads of 8, width 32, hidden layer 48; 10 tokens."""
    import finetune.model

    settings = program.parse(
        ["--device", "cpu", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--layers", "2", "--vocab", "300"]
    )
    model = program.build_model(settings, torch.device("cpu"))
    weights = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 128 + 2 * 32) + 32 + 300 * 32
    attention = 2 * 10 * 10 * 4 * 8 * 2  # half of 4 s^2 h d a layer
    assert finetune.model.count_flops(model.model.config, model, 10) == 3 * (2 * weights * 10 + attention)
    model.model.config.sliding_window = 4
    assert finetune.model.count_flops(model.model.config, model, 10) is None


TINY_HYBRID = dict(vocab=300, hidden=32, intermediate=48, layers=4, heads=2, kv_heads=1)


@pytest.mark.thorough
def test_the_flops_of_a_hybrid_are_its_own(program, monkeypatch):
    """By hand: one layer of attention, 2 heads of 16, and three gated delta rules of 4 heads with states (8, 8); 10 tokens."""
    import finetune.model
    import finetune.settings

    monkeypatch.setitem(finetune.settings.SHAPES, "1.5b-hybrid", TINY_HYBRID)
    model = program.build_model(program.parse(["--device", "cpu", "--shape", "1.5b-hybrid"]), torch.device("cpu"))
    weights = finetune.model.count_parameters(model) - 300 * 32
    attention, states = 2 * 10 * 10 * 2 * 16, 6 * 10 * 4 * 8 * 8 * 3
    assert finetune.model.count_flops(model.model.config, model, 10) == 3 * (2 * weights * 10 + attention + states)


def hybrid_steps(shape, wrapper):
    """Two steps of a small hybrid, tiled and recomputed: losses and norms, and the kinds of layers."""
    sys.path.insert(0, str(EXAMPLES))
    import finetune.settings
    import finetune_long_document as program

    finetune.settings.SHAPES[shape] = TINY_HYBRID
    options = ["--shape", shape, "--tokens", "61", "--wrapper", wrapper, "--mlp-tile", "16", "--clip", "0.3"]
    settings = program.parse(["--device", "cpu", *options])
    trainer = program.make_trainer(settings, program.build_model(settings, torch.device("cpu")), torch.device("cpu"))
    program.ra.checkpoint_layers(program.decoder_layers(trainer.model))
    trainer.run.train()
    tokens = torch.randint(300, (500,), generator=torch.Generator().manual_seed(0))
    steps = [trainer.step(program.window(tokens, 61, settings, step), 0.01) for step in range(2)]
    return [number for step in steps for number in step], trainer.model.model.config.layer_types


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["1.5b-hybrid", "1.5b-full"])
def test_a_hybrid_shape_on_two_ranks(shape):
    (wanted, kinds), *_ = call(hybrid_steps, shape, "none", ranks=1)
    assert kinds.count("full_attention") == (1 if shape == "1.5b-hybrid" else 4)
    assert wanted[0] == pytest.approx(math.log(300), rel=0.02)
    for found, _ in call(hybrid_steps, shape, "fsdp2", ranks=2):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_mlps_and_norms_are_tiled(program):
    model = program.build_model(program.parse([*TOY, "--layers", "2", "--mlp-tile", "8"]), torch.device("cpu"))
    kinds = [type(module).__name__ for module in model.modules() if getattr(module, "tile_rows", None) == 8]
    assert sorted(kinds) == ["LlamaMLP"] * 2 + ["LlamaRMSNorm"] * 5


def test_a_peer_computes_the_same(program, alone, text, tmp_path):
    """The Ulysses hook for comparisons, all-to-all around torch's attention on two ranks, and the ring on one."""
    arguments = [*TOY, "--text", str(text), "--out", str(tmp_path), "--layout", "contiguous", "--tokens", "60", "--generate", "0"]
    run(PROGRAM, *arguments, "--attention", "ulysses-sdpa")
    settings = program.parse([*arguments, "--ranks", "1"])
    training, _ = program.split_heldout(settings, program.prepare_tokens(settings, torch.device("cpu"))[1])
    trainer = program.Trainer(settings, program.build_model(settings, torch.device("cpu")), torch.device("cpu"))
    losses = [
        trainer.step(program.window(training, 60, settings, step), program.learning_rate(step, settings))[0] for step in range(4)
    ]
    assert figures(tmp_path)["losses"] == pytest.approx(losses, rel=1e-5)


def test_steps_of_peers_are_the_same_and_attention_is_computed_once(program, alone, monkeypatch, tmp_path):
    """On one rank, where activations are computed again: two steps, after a rehearsal for the second way."""
    from torch.distributed.tensor import experimental
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func] = calls.get(func, 0) + 1
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def stand_in(mesh, *, buffers, buffer_seq_dims):
        assert (mesh.size(), [x.shape[1] for x in buffers], buffer_seq_dims) == (1, [2], [1])
        calls["context_parallel"] = calls.get("context_parallel", 0) + 1
        with Count():
            yield

    monkeypatch.setattr(experimental, "context_parallel", stand_in)
    tokens = torch.randint(300, (200,), generator=torch.Generator().manual_seed(0))
    toy = ["--layers", "2", "--tokens", "60", "--steps", "2", "--generate", "0", "--heldout", "0", "--ranks", "1", "--recompute"]
    offloaded = []
    park = HostMemory.park
    monkeypatch.setattr(HostMemory, "park", lambda *args: offloaded.append(park(*args)) or offloaded[-1])
    monkeypatch.setattr(program, "save_checkpoint", lambda *args: None)
    plain = program.parse([*TOY, *toy, "--out", str(tmp_path)])
    # the command line refuses context-parallel on a CPU
    ways = [{}, dict(rehearse=30, offload=1), dict(attention="ulysses-sdpa"), dict(attention="context-parallel")]
    losses = []
    for way in ways:
        settings = dataclasses.replace(plain, **way)
        trainer = program.Trainer(settings, program.build_model(settings, torch.device("cpu")), torch.device("cpu"))
        losses.append(program.train(settings, trainer, tokens, torch.device("cpu"))["losses"])
    assert losses[1] == losses[0]
    assert len(offloaded) == (1 + 2) * 4  # input, output and two statistics of a layer, in a rehearsal and two steps
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert losses[3] == pytest.approx(losses[0], rel=1e-5)
    assert calls["context_parallel"] == 2
    for kernel in ("flash_attention_for_cpu", "flash_attention_for_cpu_backward"):
        assert calls[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default] == 2 * 2


def test_a_resumed_runs_log_goes_on_after_its_checkpoint(program, tmp_path):
    """A killed run had written more, the last line in part."""
    import finetune.files

    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    finetune.files.open_log(tmp_path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    finetune.files.open_log(tmp_path, 0).close()
    assert path.read_text() == ""


def test_text_that_is_not_utf8_is_named_before_ranks_start(program, capsys, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "empty.txt").touch()
    for option, path, message in (
        ("--text", tmp_path / "text.txt", "which is not UTF-8: byte 3 is 0xe9"),
        ("--text", tmp_path / "empty.txt", "which is empty"),
    ):
        with pytest.raises(SystemExit):
            program.parse([option, str(path)])
        assert message in capsys.readouterr().err


def test_windows_are_drawn_by_step_and_labelled_across_their_end(program):
    settings = program.parse([*TOY, "--tokens", "10"])
    tokens = torch.arange(100)
    starts = set()
    for step in range(20):
        batch = program.window(tokens, 10, settings, step)
        assert batch["shift_labels"].tolist() == (batch["input_ids"] + 1).tolist()
        assert torch.equal(batch["input_ids"], program.window(tokens, 10, settings, step)["input_ids"])
        starts.add(int(batch["input_ids"][0, 0]))
    assert len(starts) > 10
    batch = program.window(tokens, 100, settings, 0)
    assert torch.equal(batch["input_ids"][0], tokens)
    assert batch["shift_labels"][0, -1] == -100


def test_the_tail_is_held_out_and_short_documents_are_repeated(program):
    import finetune.files

    tokens = torch.arange(100)
    for arguments, length, tail in ((["--tokens", "10"], 90, 10), (["--tokens", "200"], 270, 10), (["--ranks", "6"], 100, 0)):
        settings = program.parse(["--device", "cpu", "--tokens", "0", "--heldout", "0.1", *arguments])
        training, kept = finetune.files.split_heldout(settings, tokens)
        assert (len(training), len(kept)) == (length, tail)
        assert kept.tolist() == tokens[100 - tail :].tolist()
        assert not set(training.tolist()) & set(kept.tolist())


def test_learning_rate_warms_up_and_decays(program):
    settings = program.parse(["--device", "cpu", "--steps", "20", "--warmup", "4", "--lr", "1"])
    rates = [program.learning_rate(step, settings) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0, but must be at least 1"),
        (["--heads", "3", "--hidden", "24"], "--heads is 3 and --kv-heads 2"),
        (["--hidden", "100"], "--hidden is 100, but must be a multiple of twice --heads"),
        (["--hidden", "4096"], "heads of more than 256"),
        (["--text", "/nowhere/text"], "--text is /nowhere/text, which is not a file"),
        (
            ["--resume", "/nowhere/checkpoint"],
            "/nowhere/checkpoint is not a checkpoint's folder, or not a complete one",
        ),
        (["--beside", "/nowhere/run"], "--beside is /nowhere/run, which lacks figures.json"),
        (["--vocab", "100"], "--vocab is 100, but must be at least 257"),
        (["--tokens", "3"], "--tokens is 3: 2 ranks need 4 or more"),
        (["--steps", "-1"], "--steps is -1"),
        (["--lr", "nan"], "--lr is nan, but must be at least 0"),
        (["--clip", "0"], "--clip is 0.0, but must be above 0, where every gradient would become 0"),
        (["--peak", "0"], "--peak is 0.0, but must be above 0"),
        (["--out", __file__], "which is a file: give a folder, which need not exist"),
        (
            ["--verify", "--attention", "ulysses-sdpa", "--layout", "contiguous"],
            "--verify compares ring attention with dense attention, and --attention is ulysses-sdpa",
        ),
        (["--verify", "--shape", "1b"], "--verify runs a step whole on one rank, and --shape 1b has no weights"),
        (["--model", str(EXAMPLES)], "whose weights know the tokens of a tokenizer.json that is not there"),
        (["--heldout", "1"], "--heldout is 1.0, but must be from 0"),
        (["--model", "/nowhere/model"], "--model is /nowhere/model, which is neither tiny nor"),
        (["--model", "x", "--shape", "1b"], "--shape is 1b and --model x"),
        (["--wrapper", "fsdp2", "--generate", "3"], "--generate is 3, but tokens are written with --wrapper none or ddp"),
        (["--attention", "ulysses-sdpa"], "needs --layout contiguous, not zigzag"),
        (["--attention", "context-parallel", "--layout", "striped"], "needs --layout zigzag, not striped"),
        (["--attention", "context-parallel"], "--attention is context-parallel, for which torch has no kernels on CPUs"),
        (["--offload", "-2"], "--offload is -2, but must be at least 0"),
        (["--offload", "13", "--layers", "12"], "--offload is 13, but the model has 12 layers"),
        (["--offload", "--no-recompute"], "--offload is for --attention ringattn whose activations are recomputed"),
        (["--rehearse", "3"], "--rehearse is 3: 2 ranks need 4 or more"),
        (["--zero", "2"], "--zero is 2 and --wrapper none: stages are those of --wrapper deepspeed"),
        (["--wrapper", "fsdp2", "--zero", "3"], "--zero is 3 and --wrapper fsdp2"),
        (["--wrapper", "deepspeed", "--zero", "4"], "invalid choice: 4"),
        (["--layout", "spiral"], "invalid choice: 'spiral'"),
        (["--shape", "1b", "--hidden", "64"], "--hidden is 64, but --shape 1b has a size of its own"),
        (["--shape", "1b", "--vocab", "300"], "--vocab is 300, but --shape 1b has a size of its own"),
        (["--model", str(EXAMPLES), "--kv-heads", "2"], f"--kv-heads is 2, but --model {EXAMPLES} has a size of its own"),
        (["--lr", "inf"], "--lr is inf"),
        (["--seed", str(1 << 40)], "--seed is 1099511627776, but must be from 0 to"),
        (["--prompt", "Once", "--generate", "0"], "--prompt is 'Once', but no tokens are written"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named_before_ranks_start(program, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        program.parse(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save-every", "2"], "--save-every is 2, but --wrapper deepspeed has no checkpoints here: DeepSpeed's are pickled"),
        (["--resume", "/nowhere/checkpoint"], "--resume is /nowhere/checkpoint, but --wrapper deepspeed has no checkpoints here"),
        (["--rehearse", "64"], "--rehearse is 64, but --wrapper deepspeed takes a step after every backward pass"),
        (["--generate", "3"], "--generate is 3, but tokens are written with --wrapper none or ddp"),
        (["--dtype", "float64"], "--dtype is float64 and --wrapper deepspeed, which adds gradients in fp32"),
        ([], "--wrapper is deepspeed, which is not installed: pip install 'ringattn[deepspeed]', or use --wrapper fsdp2"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_what_deepspeed_cannot_do_is_named_before_ranks_start(program, capsys, monkeypatch, arguments, message):
    """Whether it is installed is asked by name; the last case has it missing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if arguments else None)
    with pytest.raises(SystemExit) as stopped:
        program.parse(["--device", "cpu", "--wrapper", "deepspeed", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not a valid JSON file"),
        ('{"model_type": "t5"}', "T5Config belongs to no causal language model"),
        (
            '{"model_type": "cpmant", "num_hidden_layers": 1}',
            "CpmAntForCausalLM does not take its attention from AttentionInterface",
        ),
    ],
    ids=["no JSON", "no causal model", "attention of its own"],
)
def test_models_that_cannot_be_trained_are_named_before_ranks_start(program, capsys, tmp_path, config, message):
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(SystemExit):
        program.parse(["--device", "cpu", "--model", str(path)])
    said = capsys.readouterr().err
    assert f"--model is {path}, which cannot be trained" in said
    assert message in said
