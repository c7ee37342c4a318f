"""Attention of decode steps on Hopper, as far as a CPU can tell: which steps are the operator's, who writes the cache.

The bits are compared on a card, at every engine's start and by `samebits bench operators`.
"""

import ast
import pathlib
import re
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers import batch_invariant_attention as attention
from vllm.model_executor.layers import batch_invariant_fa3 as fa3
from vllm.model_executor.layers import batch_invariant_linear
from vllm.v1.attention.backends import flash_attn

from samebits.sources.fetch import fetch
from samebits.sources.pins import load_pins

KIND = (8, 2, 128**-0.5)


def impl(**changes: Any) -> flash_attn.FlashAttentionImpl:
    """An attention layer as FlashAttention 3's backend makes it, with the sizes of a Qwen3."""
    made = flash_attn.FlashAttentionImpl.__new__(changes.pop("kind", flash_attn.FlashAttentionImpl))
    facts = {
        "num_heads": KIND[0],
        "num_kv_heads": KIND[1],
        "scale": KIND[2],
        "head_size": 128,
        "attn_type": "decoder",
        "vllm_flash_attn_version": 3,
        "sliding_window": (-1, -1),
        "alibi_slopes": None,
        "sinks": None,
        "logits_soft_cap": 0,
        "kv_sharing_target_layer_name": None,
        "kv_cache_dtype": "auto",
        "dcp_world_size": 1,
    }
    for name, value in {**facts, **changes}.items():
        setattr(made, name, value)
    return made


def step(**changes: Any) -> Any:
    """The metadata of a step of three requests with a token each, as the backend's builder makes it."""
    facts = {
        "num_actual_tokens": 3,
        "max_query_len": 1,
        "query_start_loc": torch.arange(4, dtype=torch.int32),
        "max_seq_len": 40,
        "seq_lens": torch.tensor([5, 40, 0], dtype=torch.int32),
        "block_table": torch.zeros(3, 8, dtype=torch.int32),
        "slot_mapping": torch.tensor([4, 39, -1]),
        "causal": True,
        "use_cascade": False,
        "common_prefix_len": 0,
        "cu_prefix_query_lens": None,
        "prefix_kv_lens": None,
        "suffix_kv_lens": None,
    }
    made = {**facts, **changes}
    return flash_attn.FlashAttentionMetadata(**made)


CACHE = torch.zeros(9, 2, 16, 256, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_enabled", True)
    monkeypatch.setattr(attention, "_admitted", {KIND})


class Overridden(flash_attn.FlashAttentionImpl):
    """A backend of its own, as several models have: what it does to the cache is its own affair."""

    def forward(self, *arguments: Any) -> Any:
        raise AssertionError


def test_a_step_of_single_tokens_is_the_operators() -> None:
    assert attention._serves(impl(), CACHE, step())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 4},  # a kind that was not admitted
        {"head_size": 64},
        {"attn_type": "encoder_decoder"},
        {"vllm_flash_attn_version": 2},
        {"sliding_window": (1023, 0)},
        {"alibi_slopes": torch.ones(8)},
        {"sinks": torch.ones(8)},
        {"logits_soft_cap": 30.0},
        {"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"},
        {"kv_cache_dtype": "fp8"},
        {"dcp_world_size": 2},
        {"kind": Overridden},
    ],
    ids=str,
)
def test_another_layer_stays_with_flash_attention(changes: dict[str, Any]) -> None:
    assert not attention._serves(impl(**changes), CACHE, step())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_query_len": 2},
        {"num_actual_tokens": 4},  # not a token a request
        {"num_actual_tokens": attention.MOST_REQUESTS + 1},
        {"seq_lens": torch.zeros(2, dtype=torch.int32)},
        {"slot_mapping": torch.tensor([4, 39])},
        {"causal": False},
        {"use_cascade": True},
        {"sliding_window": (63, 0)},
        {"block_table": torch.zeros(3, attention.MOST_KEYS // 16 + 1, dtype=torch.int32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_step_stays_with_flash_attention(changes: dict[str, Any]) -> None:
    assert not attention._serves(impl(), CACHE, step(**changes))


@pytest.mark.parametrize(
    "cache", [CACHE.half(), torch.zeros(9, 2, 48, 256, dtype=torch.bfloat16)], ids=["fp16", "page of 48"]
)
def test_another_cache_stays_with_flash_attention(cache: torch.Tensor) -> None:
    assert not attention._serves(impl(), cache, step())


@pytest.mark.parametrize("base", ["0.26.0", "0.33.0"])
def test_what_is_asked_of_a_step_is_in_every_bases_metadata(base: str) -> None:
    artefact = next(a for a in load_pins().upstreams["vllm"].artefact if a.version == base and a.name == "vllm")
    with zipfile.ZipFile(fetch(artefact)) as wheel:
        source = wheel.read("vllm/v1/attention/backends/flash_attn.py").decode()
    (kind,) = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "FlashAttentionMetadata"]
    known = {ast.unparse(node.target) for node in ast.walk(kind) if isinstance(node, ast.AnnAssign)}
    asked = set(re.findall(r"\bmetadata\.(\w+)", pathlib.Path(attention.__file__).read_text()))
    assert asked and asked <= known


def test_nothing_is_the_operators_before_its_bits_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_admitted", set())
    assert not attention._serves(impl(), CACHE, step()) and not attention.takes_step(1, 3)


@pytest.mark.parametrize(
    ("served", "step_"), [(True, step()), (False, step(max_query_len=2))], ids=["decode", "prefill"]
)
def test_the_cache_is_written_once(monkeypatch: pytest.MonkeyPatch, served: bool, step_: Any) -> None:
    """By the operator where it serves, by vLLM's kernel elsewhere: the two questions of a step have one answer."""
    from vllm.model_executor.layers.attention import attention as layers

    written: list[str] = []
    operator = SimpleNamespace(decode_attention=lambda *arguments: written.append("operator"))
    monkeypatch.setattr(torch.ops, "batch_invariant", operator, raising=False)
    monkeypatch.setattr(layers, "get_attention_context", lambda name: (step_, None, CACHE, step_.slot_mapping))
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", lambda *arguments: written.append("vllm"), raising=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = SimpleNamespace(layer_name="a", _k_scale=None, _v_scale=None)
    made, query, key = impl(), torch.zeros(3, 8, 128), torch.zeros(3, 2, 128)
    made.do_kv_cache_update(layer, key, key, CACHE, step_.slot_mapping)
    assert attention.decode(made, query, key, key, CACHE, step_, query) == served
    assert written == (["operator"] if served else ["vllm"])


def graphs(mode: CUDAGraphMode | None) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))


@pytest.mark.parametrize(
    ("mode", "breakable", "admits"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, "0", True),
        (CUDAGraphMode.FULL_DECODE_ONLY, "0", True),
        (CUDAGraphMode.PIECEWISE, "0", True),
        (CUDAGraphMode.NONE, "0", True),
        (None, "0", True),
        (CUDAGraphMode.FULL, "0", False),  # mixed steps are captured with a token a request, and replayed for prefills
        (CUDAGraphMode.PIECEWISE, "1", False),  # so is what writes the cache, without what would decide anew
    ],
)
def test_graphs_that_mixed_steps_replay_admit_nothing(
    monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode | None, breakable: str, admits: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    monkeypatch.setattr(attention, "_admitted", set())
    monkeypatch.setattr(attention, "_differ", lambda *kind: 0)
    monkeypatch.setattr(batch_invariant_linear, "remembered", lambda name, find, of: (find(), True))
    model = torch.nn.Module()
    model.impl = impl()
    attention.admit_model(model, graphs(mode))
    assert bool(attention._admitted) == admits


@pytest.mark.parametrize(("differ", "serves"), [(0, True), (3, False)])
def test_a_kind_of_layer_is_admitted_by_its_bits(monkeypatch: pytest.MonkeyPatch, differ: int, serves: bool) -> None:
    monkeypatch.setattr(attention, "_admitted", set())
    asked: list[tuple[int, int, float]] = []

    def compare(*kind: Any) -> int:
        asked.append(kind)
        return differ

    monkeypatch.setattr(attention, "_differ", compare)
    monkeypatch.setattr(batch_invariant_linear, "remembered", lambda name, find, of: (find(), True))
    model = torch.nn.Module()
    for i in range(3):  # two of one kind, and one that the operator is not for
        layer = torch.nn.Module()
        layer.impl = impl(head_size=64) if i == 2 else impl()
        model.add_module(f"layer{i}", layer)
    attention.admit_model(model, graphs(CUDAGraphMode.FULL_AND_PIECEWISE))
    assert asked == [KIND] and attention._serves(impl(), CACHE, step()) == serves


@pytest.mark.parametrize("head", [32, 64, 65, 128])
def test_a_small_heads_tile_does_not_depend_on_the_neighbours(head: int) -> None:
    """vllm#47069, #51902: up to 64 rows of a query and its group, other tiles than above; seen on a card."""
    told = {fa3.longest_query(head, longest) * 1 > 64 for longest in (1, 9, 10, 64, 65, 4096)}
    assert told == ({True} if head <= 64 else {True, False})
    assert fa3.longest_query(head, 4096) == 4096


@pytest.mark.parametrize(
    ("head", "page", "refused"),
    [(96, 144, True), (80, 288, True), (192, 112, True), (96, 16, False), (128, 144, False), (192, 144, False)],
)
def test_a_page_that_is_a_tile_of_its_own_is_refused(head: int, page: int, refused: bool) -> None:
    if not refused:
        return fa3.check_tiles(head, page)
    with pytest.raises(ValueError, match=f"heads of {head} and blocks of {page} tokens.* --block-size 16"):
        fa3.check_tiles(head, page)
    return None


def test_the_schedule_is_made_once_where_flash_attention_needs_one() -> None:
    def schedules(longest: int, requests: int, **changes: Any) -> bool:
        facts = {"headdim": 128, "aot_sliding_window": (-1, -1), **changes}
        return fa3.schedules(SimpleNamespace(**facts), longest, requests)

    assert schedules(1, attention.MOST_REQUESTS + 1) and schedules(7, 1)
    assert not schedules(1, 1), "the operator takes that step"
    assert not schedules(7, 1, headdim=64), "its longest query is not the step's"
    assert not schedules(7, 1, aot_sliding_window=(63, 0)), "its layers are told of more keys"


def test_a_window_is_compared_with_the_same_keys_in_every_step() -> None:
    table, cache = torch.zeros(3, 8, dtype=torch.int32), CACHE.transpose(1, 2)
    assert {fa3.most_keys(longest, table, cache) for longest in (1, 40, 128)} == {128}
