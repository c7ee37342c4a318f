"""Layer 1 by itself: the bridge, what counts as wrong, planted faults and their right siblings, false differences."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.judge import gradients as plan
from samebits.judge import updates, vjp
from samebits.judge.modules import MODULES
from samebits.judge.updates import AdamW, Moments, UpdateError
from samebits.judge.vjp import UNIT, Bridge, Cotangent, Expected, Measured, Problem, visible_with_surrogate
from samebits.probe.specimens import FAULTS, Fault, modules, specimen

DTYPES = list(UNIT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrong(found: list[Measured]) -> dict[str, str]:
    return {one.tensor: one.wrong for one in found if one.wrong and one.resolved}


def linear_problem(dtype: torch.dtype = torch.bfloat16, case: str = "unaligned tails", seed: int = 0) -> Problem:
    return MODULES["linear"].problem(case, dtype, "random", seed)


def right_linear(t: Any, c: Any) -> torch.Tensor:
    return (t["x"].float() @ t["weight"].float().t()).to(t["x"].dtype)


# --- the bridge


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES))
def test_the_bridge_shows_one_sides_bits_and_gives_the_others_gradient(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator).to(dtype).requires_grad_()
    visible, cotangent = (torch.randn(4, 3, generator=generator).to(dtype) for _ in range(2))
    out = visible_with_surrogate(visible.requires_grad_(), x * 3)
    assert torch.equal(out, visible)
    at_x, at_visible = torch.autograd.grad(out, (x, visible), cotangent, allow_unused=True)
    assert torch.equal(at_x, (cotangent * 3).to(dtype)) and at_visible is None


@pytest.mark.parametrize(
    "surrogate", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, device="meta")], ids=str
)
def test_a_surrogate_of_another_shape_dtype_or_device_is_refused(surrogate: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="the formula is not the module's"):
        visible_with_surrogate(torch.zeros(2), surrogate)


def test_a_surrogate_is_of_the_values_that_were_shown() -> None:
    """y = x w by a forward that doubles: the slope in w is x, that in x is w, and the next module sees the double."""
    shown = Bridge(torch.float32, {"product": lambda x, w: 2 * x * w})
    x, w = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (3.0, 5.0))
    out = shown.show("product", x * w, x, w)
    (out * out).sum().backward()
    assert out.item() == 30 and x.grad is not None and x.grad.item() == 2 * 30 * 5


# --- what is wrong


def judged(found: torch.Tensor | None, exact: torch.Tensor, floor: float = 1e-3, largest: float = 1e-3) -> Measured:
    return vjp.measure("x", found, Expected(exact, floor, largest), torch.float32, 2.0)


def test_what_is_measured_is_what_it_says() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    found = judged(torch.tensor([3.0, 4.0005]), exact)
    assert found.wrong is None and found.max_abs == pytest.approx(5e-4, rel=1e-3)
    assert found.relative == pytest.approx(1e-4, rel=1e-3) and found.floor == pytest.approx(2e-4)
    assert found.multiple == pytest.approx(0.5, rel=1e-3) and found.tolerance == pytest.approx(4e-4)
    assert found.norm_ratio == pytest.approx(1.00008, rel=1e-6) and found.cosine == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "missing"),
        (torch.zeros(3), r"of shape \(3,\), not \(2,\)"),
        (torch.zeros(2).bfloat16(), "of bfloat16, not float32"),
        (torch.tensor([math.nan, 4.0]), "not finite"),
        (torch.tensor([math.inf, 4.0]), "not finite"),
        (torch.zeros(2), "off"),
        (torch.tensor([-3.0, -4.0]), "off"),
        (torch.tensor([3.0, 4.0]) * 1.01, "off"),
    ],
    ids=str,
)
def test_a_wrong_gradient_is_said_to_be(found: torch.Tensor | None, said: str) -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    text = judged(found, exact).wrong
    assert text is not None and re.fullmatch(said, text)


def test_one_bad_element_among_many_is_seen() -> None:
    """In L2 it is below the tolerance; by itself it is a hundred times what noise moves an element."""
    exact = torch.ones(10_000, dtype=torch.float64)
    bad = exact.float()
    bad[17] += 0.1
    assert judged(bad, exact, floor=0.2, largest=1e-3).wrong == "off at an element"


def test_of_a_zero_reference_only_a_zero_is_right_and_no_cosine_is_made_up() -> None:
    exact = torch.zeros(2, dtype=torch.float64)
    for found in (torch.zeros(2), None):
        one = judged(found, exact, floor=0, largest=0)
        assert one.wrong is None and one.relative is one.cosine is one.norm_ratio is None and one.max_abs == 0
    assert judged(torch.tensor([0.0, 1e-30]), exact, floor=0, largest=0).wrong == "not zero"


def test_a_floor_that_hides_everything_covers_nothing() -> None:
    exact = torch.tensor([1.0], dtype=torch.float64)
    one = judged(torch.tensor([1.2]), exact, floor=0.3, largest=1.0)
    assert one.wrong is None and not one.resolved


def test_a_differentiable_input_without_gradient_is_missing() -> None:
    problem = linear_problem()
    found = vjp.compare(lambda t, c: right_linear({**t, "weight": t["weight"].detach()}, c), problem)
    assert wrong(found) == {"weight": "missing"}
    found = vjp.compare(lambda t, c: right_linear(t, c).detach(), problem)
    assert wrong(found) == {"x": "missing", "weight": "missing"}


# --- floors and tolerances


@pytest.mark.parametrize("module", ["linear", "rms_norm", "attention", "silu_and_mul"])
def test_floor_and_tolerance_are_there_before_the_module_runs(module: str) -> None:
    """They are of the problem: one for all candidates, about a unit roundoff, and smaller in fp32 than in bf16."""
    floors = {}
    for dtype in DTYPES:
        problem = MODULES[module].problem(next(iter(MODULES[module].cases)), dtype, "random", 1)
        expected = vjp.expected(problem)
        assert expected.keys() == problem.inputs.keys()
        for name, one in expected.items():
            floors[dtype, name] = one.floor / float(one.gradient.norm())
            again = vjp.expected(problem)[name]
            assert again.floor == one.floor and torch.equal(again.gradient, one.gradient)
            assert UNIT[dtype] / 3 <= floors[dtype, name] <= 16 * UNIT[dtype]
    assert all(floors[torch.float32, n] < floors[torch.bfloat16, n] / 1000 for _, n in floors)


@pytest.mark.parametrize("reduction", [1, 97, 4096])
def test_the_tolerance_is_of_dtype_and_reduction_alone(reduction: int) -> None:
    assert vjp.factor(torch.float32, reduction) == 2 + math.sqrt(reduction)
    assert vjp.factor(torch.bfloat16, reduction) == 2 + math.sqrt(reduction) * 2.0**-16


def test_a_cancelling_gradient_has_a_high_floor() -> None:
    """dX of a norm along x is nearly nothing: the difference of two large numbers, each rounded."""
    problem = MODULES["rms_norm"].problem("unaligned tails", torch.float32, "random", 0)
    along = (problem.inputs["x"].double() / problem.inputs["weight"].double()).float()
    cancelling = Problem(**{**vars(problem), "cotangents": (along,)})
    plain, high = (vjp.expected(one)["x"] for one in (problem, cancelling))
    assert high.floor / float(high.gradient.norm()) > 100 * plain.floor / float(plain.gradient.norm())
    assert wrong(vjp.compare(specimen("rms_norm"), cancelling)) == {}


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(["random", "zero", "sparse", "ones"]))
def test_cotangents_are_of_the_kind_that_was_asked_for(seed: int, kind: Cotangent) -> None:
    like = torch.empty(33, 3, dtype=torch.bfloat16)
    (made,) = vjp.cotangents_like(kind, [like], torch.Generator().manual_seed(seed))
    assert made.dtype == like.dtype and made.shape == like.shape
    nonzero = int(made.count_nonzero())
    assert {"random": nonzero > 90, "zero": nonzero == 0, "sparse": 1 <= nonzero <= 6, "ones": nonzero == 99}[kind]


def test_finite_differences_tell_a_wrong_reference_from_a_right_one() -> None:
    problem = MODULES["silu_and_mul"].problem("one row", torch.float32, "random", 0)
    assert vjp.finite_difference_error(problem) <= vjp.DIFFERENCES
    bad = Problem(**{**vars(problem), "surrogate": lambda t, c, b: visible_with_surrogate(
        problem.surrogate(t, c, b), 1.01 * problem.surrogate(t, c, b))})  # type: ignore[arg-type, operator]  # fmt: skip
    assert vjp.finite_difference_error(bad) > vjp.DIFFERENCES


def test_a_surrogate_of_another_forward_is_told() -> None:
    error, allowed = vjp.forward_error(right_linear, linear_problem())
    assert error <= allowed
    error, allowed = vjp.forward_error(lambda t, c: right_linear(t, c) * 1.02, linear_problem())
    assert error > allowed


# --- planted faults, and their right siblings


def named(fault: Fault, cotangents: tuple[Cotangent, ...]) -> dict[str, str]:
    """What layer 1 names for it, over all cases of its module and both dtypes."""
    candidate, module = specimen(fault.module, fault.name), MODULES[fault.module]
    found: dict[str, str] = {}
    for dtype in DTYPES:
        for case in module.cases:
            for cotangent in cotangents:
                found |= wrong(vjp.compare(candidate, module.problem(case, dtype, cotangent, 0)))
    return found


def test_there_are_enough_faults_and_the_public_reports_are_among_them() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= plan.LEAST_FAULTS
    assert {fault.report for fault in FAULTS if fault.report} == {
        "TransformerEngine#3141", "sglang#40903", "axolotl#3745", "ISEEKYAN/Megatron-LM#79", "mcore-bridge#125",
    }  # fmt: skip
    assert set(modules()) == set(plan.SPECIMENS) and {fault.module for fault in FAULTS} <= set(modules())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_and_its_tensors_are_named(fault: Fault) -> None:
    assert sorted(named(fault, ("random", "sparse"))) == sorted(fault.tensors)


UNSEEN = (
    "cotangent of swapped batch and sequence",
    "cotangent read by dimensions",
    "detached router",
    "probabilities gathered after masking",
)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_sum_and_its_backward_alone_do_not_see_it(name: str) -> None:
    """`y.sum().backward()`: all cotangents are one, on the same inputs, with the same reference and tolerance."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert named(fault, ("ones",)) == {}
    assert len(UNSEEN) >= plan.LEAST_UNSEEN


def assert_not_accused(module: str, seeds: range) -> None:
    for dtype in DTYPES:
        for case in MODULES[module].cases:
            for cotangent in plan.COTANGENTS:
                for seed in seeds:
                    found = vjp.compare(specimen(module), MODULES[module].problem(case, dtype, cotangent, seed))
                    accused = [one for one in found if one.wrong or not one.resolved]
                    assert not accused, f"{case}, {cotangent}, seed {seed}: {accused}"


@pytest.mark.parametrize("module", plan.SPECIMENS)
def test_a_right_module_is_not_accused(module: str) -> None:
    assert_not_accused(module, range(1))


@pytest.mark.evidence
@pytest.mark.parametrize("module", plan.SPECIMENS)
def test_a_right_module_is_not_accused_in_100_seeds(module: str) -> None:
    assert_not_accused(module, range(100))


# --- false differences (seed 000): each made a right gradient look wrong


def test_cotangents_of_two_precisions_are_no_comparison() -> None:
    """FP32 dY on one side and its rounding on the other differ by dY's rounding, whatever the backward does."""
    problem = linear_problem()
    wide = tuple(torch.randn(c.shape) for c in problem.cotangents)
    with pytest.raises(ValueError, match="give both sides the cotangent that the output has"):
        vjp.compare(right_linear, Problem(**{**vars(problem), "cotangents": wide}))
    # The difference that it would have been, in fp32, where it is thousands of floors; with one cotangent it is none.
    exact = linear_problem(torch.float32)
    rounded = Problem(**{**vars(exact), "cotangents": tuple(c.bfloat16().float() for c in exact.cotangents)})
    found = vjp.beside(vjp.gradients(right_linear, rounded), exact)
    assert wrong(found) == {"x": "off", "weight": "off"} and all((one.multiple or 0) > 1000 for one in found)
    for problem in (exact, rounded):
        assert wrong(vjp.compare(right_linear, problem)) == {}


OPTIMIZER = AdamW(learning_rate=1e-2, beta1=0.9, beta2=0.99, epsilon=1e-8, clip=0.0)


class Training:
    """x W^T on a main in FP32, three steps in; `scaled`: what its step does to gradients before Adam takes them."""

    def __init__(self, scaled: float = 1.0, decay: float = 0.1):
        self.problem = linear_problem(torch.float32, "batched, square")
        inputs = self.problem.inputs
        self.main = torch.nn.Parameter(inputs["weight"].clone())
        self.scaled = scaled
        self.adam = torch.optim.AdamW([self.main], lr=1e-2, betas=(0.9, 0.99), weight_decay=decay)
        for _ in range(3):
            self.main.grad = torch.randn(self.main.shape, generator=torch.Generator().manual_seed(4))
            self.adam.step()
        self.problem = Problem(**{**vars(self.problem), "inputs": {**inputs, "weight": self.main.detach().clone()}})

    def backward(self) -> torch.Tensor:
        """The gradient as it stands after the backward; the step scales it."""
        found = vjp.gradients(right_linear, self.problem)["weight"]
        assert found is not None
        self.main.grad = found / self.scaled
        return self.main.grad.clone()

    def step(self) -> None:
        assert self.main.grad is not None
        self.main.grad.mul_(self.scaled)
        self.adam.step()

    def judged(self, frozen: tuple[str, ...] = ()) -> tuple[list[Measured], list[Measured]]:
        state = updates.moments(self.adam, {"weight": self.main})
        taken = updates.taken(self.adam, {"weight": self.main}, self.step)
        change = (self.main.detach().double() - state["weight"].main.double()).float()
        return updates.beside(taken, {"weight": change}, state, OPTIMIZER, self.problem, frozen)


@pytest.mark.parametrize("scaled", [1.0, 0.25])
def test_a_gradient_that_the_step_scales_is_read_when_it_is_taken(scaled: float) -> None:
    """Dumped after the backward it is off by the constant alone: cosine one, and a ratio of norms that says by what."""
    training = Training(scaled)
    dumped = training.backward()
    (before,) = [one for one in vjp.beside({"x": None, "weight": dumped}, training.problem) if one.tensor == "weight"]
    assert (before.wrong == "off") == (scaled != 1.0)
    assert before.cosine == pytest.approx(1.0) and before.norm_ratio == pytest.approx(1 / scaled, rel=1e-5)
    gradients, changes = training.judged()
    assert wrong(gradients) == wrong(changes) == {}


def test_a_wrong_scale_in_the_step_is_no_false_difference() -> None:
    training = Training()
    training.backward()
    training.scaled = 0.25
    gradients, changes = training.judged()
    assert wrong(gradients) == wrong(changes) == {"weight": "off"}


def test_a_copy_that_the_optimizer_does_not_hold_is_refused() -> None:
    """As FSDP2's unsharded parameter is: right in its values, and nothing comes of what is done to it."""
    training = Training()
    copy = training.main.detach().clone()
    with pytest.raises(UpdateError, match=r"weight: the optimizer does not hold this tensor; it is a copy"):
        updates.moments(training.adam, {"weight": copy})


def test_a_gradient_of_zero_under_weight_decay_is_a_change_that_the_reference_has_too() -> None:
    training = Training()
    training.problem = Problem(
        **{**vars(training.problem), "cotangents": tuple(torch.zeros_like(c) for c in training.problem.cotangents)}
    )
    training.backward()
    before = training.main.detach().clone()
    gradients, changes = training.judged()
    assert wrong(gradients) == wrong(changes) == {} and not torch.equal(before, training.main)


def test_a_frozen_parameter_that_decays_is_told_and_one_that_is_frozen_is_not() -> None:
    training = Training()
    training.main.grad = torch.zeros_like(training.main)
    _, changes = training.judged(frozen=("weight",))
    assert wrong(changes) == {"weight": "not zero"}
    training.main.grad = None
    state = updates.moments(training.adam, {"weight": training.main})
    taken = updates.taken(training.adam, {"weight": training.main}, training.adam.step)
    change = (training.main.detach().double() - state["weight"].main.double()).float()
    _, changes = updates.beside(taken, {"weight": change}, state, OPTIMIZER, training.problem, ("weight",))
    assert wrong(changes) == {} and taken == {"weight": None}


def test_a_step_that_is_none_or_two_is_refused() -> None:
    training = Training()
    training.backward()
    with pytest.raises(UpdateError, match="took 0 steps"):
        updates.taken(training.adam, {"weight": training.main}, lambda: None)

    def twice() -> None:
        training.adam.step()
        training.adam.step()

    with pytest.raises(UpdateError, match="took 2 steps"):
        updates.taken(training.adam, {"weight": training.main}, twice)


def test_clipping_is_of_the_global_norm_and_decay_of_the_main() -> None:
    """By hand: gradients (3, 4) of two mains, norm 5, clipped to 1; of a first step Adam's quotient is the sign."""
    one = AdamW(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=0.0, clip=1.0)
    gradients = {"a": torch.tensor([3.0]).double(), "b": torch.tensor([4.0]).double()}
    taken = one.clipped(gradients)
    assert taken["a"].item() == pytest.approx(0.6, rel=1e-6) and taken["b"].item() == pytest.approx(0.8, rel=1e-6)
    zero = torch.zeros(1)
    state = {n: Moments(torch.tensor([2.0]), zero, zero, 0.5 * (n == "b"), 1) for n in "ab"}
    changes = one.changes(state, taken)
    assert changes["a"].item() == pytest.approx(-0.1) and changes["b"].item() == pytest.approx(-0.1 - 0.1 * 0.5 * 2)


def test_from_a_level_state_no_element_is_divided_by_next_to_nothing() -> None:
    """Of an element whose gradients were 1e-9 Adam makes a step as large as any; of rounding in it, too."""
    main = torch.nn.Parameter(torch.zeros(4))
    adam = torch.optim.AdamW([main], lr=1.0, weight_decay=0.0)
    main.grad = torch.tensor([1.0, 1.0, 1.0, 1e-9])
    adam.step()
    updates.level(adam)
    state = updates.moments(adam, {"main": main})["main"]
    assert torch.equal(state.second, state.second.mean().expand(4)) and state.second[0] > 0
    before = main.detach().clone()
    main.grad = torch.tensor([1.0, 1.0, 1.0, -1e-9])
    adam.step()
    change = (main.detach() - before).abs()
    assert change[3] < 1e-6 * change[0]
