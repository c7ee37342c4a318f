"""The admission of linears on CUDA, as far as a CPU can tell: what is compared, what is refused, which rows get what.

The reference and the implementations are stand-ins here, products on the CPU; on a card they are kernels, compared by
the same code at every engine's start.
"""

import pytest
import torch
from vllm.model_executor.layers import batch_invariant_linear as admission
from vllm.model_executor.layers import batch_invariant_sm90 as hopper

from samebits.evidence.measurement import GEMM
from samebits.sources.pins import ROOT

N, K = 24, 40


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Row by row, so that a row's bits are its own."""
    rows = [(row.float() * weight.float()).sum(-1) for row in x]
    return torch.stack(rows).to(torch.bfloat16)


def wrong_at(*rows: int):
    """The product with one bit of its last element flipped for these numbers of rows."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = product(x, weight)
        if x.shape[0] in rows:
            out.view(torch.int16)[-1, -1] ^= 1
        return out

    return run


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch):
    """Admission over the CPU with the given implementations, in the order of their offers."""
    monkeypatch.setattr(admission, "DEVICE", "cpu")
    monkeypatch.setattr(admission, "_free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(admission, "RANGES", ((65, 80), (81, 96)))
    monkeypatch.setattr(admission, "_reference", product)

    def run(**implementations: admission.Implementation) -> admission.Plan:
        fallback = admission.Implementation(admission.FALLBACK, product)
        monkeypatch.setattr(admission, "_implementations", {admission.FALLBACK: fallback, **implementations})
        return admission._find(N, K)

    return run


def test_what_has_the_bits_serves_and_what_was_offered_last_serves_first(find) -> None:
    plan = find(
        library=admission.Implementation("library", product),
        few=admission.Implementation("few", product, most_rows=16),
    )
    assert plan.single == ["few"] * 16 + ["library"] * 48 and plan.ranges == ["library"] * 2 and not plan.refused


def test_one_bit_at_one_number_of_rows_is_refused_there_and_named(find) -> None:
    plan = find(
        library=admission.Implementation("library", product),
        few=admission.Implementation("few", wrong_at(1, 33), most_rows=64),
    )
    assert [m for m, name in enumerate(plan.single, 1) if name != "few"] == [1, 33]
    assert plan.single[0] == plan.single[32] == "library"
    assert plan.refused == ["few refused at M = 1, 33: other bits than the reference, or none"]


def test_a_range_with_one_wrong_sample_falls_back_as_a_whole(find) -> None:
    plan = find(library=admission.Implementation("library", wrong_at(80)))
    assert plan.ranges == [admission.FALLBACK, "library"] and plan.single == ["library"] * 64


def test_an_implementation_that_raises_is_refused(find) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no kernel")

    plan = find(library=admission.Implementation("library", run))
    assert set(plan.single + plan.ranges) == {admission.FALLBACK}


def test_want_of_memory_is_no_finding(find) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        find(library=admission.Implementation("library", run))


def test_a_range_that_has_no_room_is_not_admitted(find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_free_bytes", lambda: 4 * 2 * 85 * (N + K))
    plan = find(library=admission.Implementation("library", product))
    assert plan.ranges == ["library", admission.FALLBACK]


def test_nan_is_nan_whatever_its_bits(find) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = product(x, weight)
        out.view(torch.int16)[out.isnan()] = 0x7FC1
        return out

    assert not find(library=admission.Implementation("library", run)).refused


def test_every_number_of_rows_is_served_by_the_plan_of_its_range() -> None:
    ranges = [f"range {first}" for first, _ in admission.RANGES]
    plan = admission.Plan([f"single {m}" for m in range(1, admission.SINGLE + 1)], ranges)
    for m in range(1, admission.SINGLE + 1):
        assert plan.serving(m) == f"single {m}"
    for first, last in admission.RANGES:
        for m in {first, first + 1, (first + last) // 2, last}:
            assert plan.serving(m) == f"range {first}"
    assert plan.serving(admission.RANGES[-1][1] + 1) == admission.FALLBACK


def test_the_inputs_show_the_order_of_a_sum_and_hold_what_is_special(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "DEVICE", "cpu")
    for kind in admission.INPUTS:
        generator = torch.Generator().manual_seed(1)
        x = admission._rows(kind, 300, 512, generator)
        weight = admission._weight(kind, 16, 512, generator)
        if kind == "cancelling":
            out = x.double() @ weight.double().t()
            assert out.abs().median() < 0.05 * (x.double().abs() @ weight.double().t().abs()).median()
        if kind == "special":
            assert x.isnan().any() and x.isinf().any() and (x == 0).any() and torch.signbit(x[x == 0]).any()
            assert x[::3].isfinite().all()
            tiny = x[(x != 0) & x.isfinite()].abs().min()
            assert tiny < torch.finfo(torch.bfloat16).smallest_normal


@pytest.mark.parametrize("n, k", sorted(hopper.TILES))
def test_the_table_of_tiles_names_kernels_that_there_are_for_all_rows(n: int, k: int) -> None:
    lasts = [last for last, _ in hopper.TILES[n, k]]
    assert lasts == sorted(lasts) and lasts[-1] == hopper.MOST_ROWS and hopper.offers(n, k)
    for m in range(1, hopper.MOST_ROWS + 1):
        assert hopper.columns(n, k, m, 132) in hopper.WIDTHS


def test_the_table_of_tiles_is_near_the_fastest_that_was_measured() -> None:
    """Two times of one width differ by up to 7 % in a run. Judged by the widths' times, not by what served then."""
    rows = GEMM.read(ROOT / "manifests" / "evidence" / "h200" / "gemm.json")["rows"]
    chosen = [row["widths"][str(hopper.columns(row["n"], row["k"], row["m"], 132))] for row in rows]
    lost = [taken / min(row["widths"].values()) for taken, row in zip(chosen, rows, strict=True)]
    assert max(lost) < 1.12 and sum(lost) / len(lost) < 1.01


def test_a_shape_without_an_entry_gets_the_width_with_the_least_left_over() -> None:
    assert hopper.columns(132 * 48, 4096, 1, 132) == 48 and hopper.columns(132 * 32, 4096, 1, 132) == 32


def test_a_routers_kernel_is_not_chosen_by_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the switch a gate is a plain linear at any number of rows; without it the upstream's choice is asked."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    gate = GateLinear.__new__(GateLinear)
    torch.nn.Module.__init__(gate)
    gate.out_dtype = torch.float32
    monkeypatch.setattr(ReplicatedLinear, "forward", lambda self, x: (x * 2, None))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for rows in (1, 16, 17, 33):
        out, bias = gate.forward(torch.ones(rows, 4, dtype=torch.bfloat16))
        assert out.dtype == torch.float32 and bool((out == 2).all()) and bias is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with pytest.raises(AttributeError, match="allow_"):
        gate.forward(torch.ones(1, 4, dtype=torch.bfloat16))


def test_no_norm_is_fused_into_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.vllm import enable_allreduce_rms_fusion

    nothing = object()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert enable_allreduce_rms_fusion(nothing) is False  # whatever the configuration
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with pytest.raises(AttributeError, match="parallel_config"):
        enable_allreduce_rms_fusion(nothing)


def test_a_card_that_is_no_hopper_has_no_kernels_and_a_wheel_without_them_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert not admission.load_for_hopper("rows")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(RuntimeError, match=r"there is no .*batch_invariant_rows\.so\. Remedy: install the vLLM wheel"):
        admission.load_for_hopper("rows")  # the CPU's wheel carries none
