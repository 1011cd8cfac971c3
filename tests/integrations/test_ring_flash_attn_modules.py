"""The package's modules, as programs import them: the same functions, and errors that name what has no meaning here."""

import importlib
import sys
import types
from unittest import mock

import pytest
import torch

from ringattn.integrations import ring_flash_attn, ring_flash_attn_models


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "ring_flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def installed():
    forget()
    ring_flash_attn.install()
    ring_flash_attn.install()
    yield
    forget()


# one line each of prime-rl, OpenRLHF, slime, axolotl, verl's recipes and others, by what they take
IMPORTS = [
    ("", "llama3_flash_attn_varlen_func update_ring_flash_attn_params substitute_hf_flash_attn ring_flash_attn_func"),
    (".adapters", "substitute_hf_flash_attn update_ring_flash_attn_params"),
    (".ring_flash_attn", "ring_flash_attn_func ring_flash_attn_kvpacked_func ring_flash_attn_qkvpacked_func"),
    (".ring_flash_attn_varlen", "ring_flash_attn_varlen_func ring_flash_attn_varlen_qkvpacked_func"),
    (".zigzag_ring_flash_attn", "zigzag_ring_flash_attn_func zigzag_ring_flash_attn_kvpacked_func"),
    (".zigzag_ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen_func zigzag_ring_flash_attn_varlen_kvpacked_func"),
    (".stripe_flash_attn", "stripe_flash_attn_func stripe_flash_attn_qkvpacked_func"),
    (".llama3_flash_attn_varlen", "llama3_flash_attn_varlen_func llama3_flash_attn_prepare_cu_seqlens"),
]


def test_programs_import_the_package_and_its_modules(installed):
    for module, names in IMPORTS:
        found = importlib.import_module("ring_flash_attn" + module)
        assert all(getattr(found, name) is getattr(ring_flash_attn, name) for name in names.split())
    scope = {}
    exec("import ring_flash_attn.adapters.hf_adapter\nx = ring_flash_attn.adapters.hf_adapter.check_params", scope)
    assert scope["x"](lambda a, b: 0, lambda c, d=1: 0) and not scope["x"](lambda a: 0, lambda: 0)
    exec("from ring_flash_attn.adapters.hf_adapter import create_ring_flash_attention_forward, use_ring_attn, DATA_PARAMS", scope)
    with pytest.raises(ValueError, match="call substitute_hf_flash_attn"):
        scope["create_ring_flash_attention_forward"](None, 1)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("utils", "RingComm", "RingComm is a part of the package ring_flash_attn's own ring, .*: use ring_attention"),
        ("utils", "flatten_varlen_lse", "use return_attn_probs=True"),
        ("ring_flash_attn", "ring_flash_attn_forward", "use ring_flash_attn_func, whose backward pass is autograd's"),
        ("llama3_flash_attn_varlen", "Llama3FlashAttnVarlenFunc", "use llama3_flash_attn_varlen_func"),
        ("adapters.hf_adapter", "RING_ATTN_SWITCH", "use use_ring_attn"),
    ],
)
def test_names_without_a_meaning_say_what_to_use(installed, module, name, message):
    with pytest.raises(ImportError, match=message):
        exec(f"from ring_flash_attn.{module} import {name}")
    assert not hasattr(importlib.import_module(f"ring_flash_attn.{module}"), "no_such_name")


def test_the_package_itself_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "ring_flash_attn", types.ModuleType("ring_flash_attn"))
    with pytest.raises(ValueError, match=r"was imported already, from None: call install\(\) before"):
        ring_flash_attn.install()


def gathered(group):
    from ringattn.integrations.ring_flash_attn.utils import AllGatherComm, get_default_args

    gathering, found = AllGatherComm(group), torch.empty(2, 2, 3)
    for i in range(2):
        gathering.all_gather(found[i], torch.full((1, 3), 10.0 * i + group.rank()))
    gathering.wait()
    assert not gathering.handles
    assert list(get_default_args(ring_flash_attn.ring_flash_attn_func).items())[-2:] == [
        ("return_attn_probs", False),
        ("group", None),
    ]
    return found[..., 0].tolist()


def test_tensors_are_gathered(gloo):
    assert gloo.run(2, gathered) == [[[0.0, 1.0], [10.0, 11.0]]] * 2


def attended(group):
    """What a program's own attention around the ring takes of the documents given last."""
    from ringattn.integrations.ring_flash_attn.adapters.hf_adapter import DATA_PARAMS, update_ring_flash_attn_params
    from ringattn.integrations.ring_flash_attn.llama3_flash_attn_varlen import llama3_flash_attn_varlen_func

    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    whole = torch.randn(3, 12, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # the ranks serve other tests, too, which may have substituted something
    with mock.patch.object(ring_flash_attn_models, "_substituted", return_value=None):
        update_ring_flash_attn_params(bounds, group)
    q, k, v = (x.chunk(group.size())[group.rank()] for x in whole)
    own = llama3_flash_attn_varlen_func(q, k, v, **DATA_PARAMS, heads_k_stride=1, causal=True, group=group)
    parts = [x.transpose(1, 2) for x in whole.split([5, 7], 1)]
    attention = torch.nn.functional.scaled_dot_product_attention
    dense = torch.cat([attention(*x.unbind(), is_causal=True).transpose(0, 1) for x in parts])
    return float((own - dense.chunk(group.size())[group.rank()]).abs().max())


def test_the_arguments_of_the_latest_documents_are_kept(gloo):
    pytest.importorskip("transformers")
    assert max(gloo.run(3, attended)) < 1e-12
