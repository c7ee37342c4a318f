"""The gradient contract as a table: for each module class what its gradient is, and the tests that hold it to that.

`docs/backward-contract.md` carries the table; `samebits check contract` compares it, and the tests that the rows name,
with what is there. The columns are those that seed 000 wants decided before a backward is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from .contract import Catalogue, names, table


@dataclass(frozen=True)
class Row:
    """One module class. visible: the forward. trainable: what has a gradient, and what has none. surrogate: whose
    derivative it is. discrete: what is chosen and not differentiated. backward: what computes it, in which precision.
    saved: what is kept, and what recomputation may do. accepted: the reference and the tolerance. tests: each as
    FILE::FUNCTION."""

    module: str
    visible: str
    trainable: str
    surrogate: str
    discrete: str
    backward: str
    saved: str
    accepted: str
    tests: tuple[str, ...]


_LAYER_1 = "tests/integration/test_gradients.py"
_UNIT = "tests/unit/test_vjp.py"
_QUANTIZED = "tests/unit/test_quantized.py"
_ALIGNED = "tests/integration/test_megatron_aligned.py"
_MODULES = (
    f"{_LAYER_1}::test_a_module_of_the_aligned_model_is_right_in_both_dtypes",
    f"{_ALIGNED}::test_a_functions_gradients_are_autograds",
)
_MODEL = (f"{_LAYER_1}::test_gradients_and_one_step_updates_of_the_model_are_the_references",)
_SPECIMEN = (
    f"{_UNIT}::test_a_right_module_is_not_accused",
    f"{_UNIT}::test_a_planted_fault_is_caught_and_its_tensors_are_named",
)
_ITS_OWN = "the forward's own formula, FP64 autograd; floor · (2 + √n · 2⁻²⁴ / u)"
_OPERATOR = "`torch.ops.batch_invariant.{}`, bf16 or fp32"

ROWS = (
    Row(
        "linear: QKV, attention output, both of the MLP, output layer",
        _OPERATOR.format("linear") + ", no bias",
        "x, weight",
        "x · Wᵀ; nothing is quantized, so there is no STE",
        "none",
        "two torch products in the dtype, FP32 sums; on a CPU without bf16 products in FP32; dX and dW rounded once",
        "x and weight; recomputation repeats the operator, whose bits are the same",
        f"{_ITS_OWN}, n = tokens or outputs, the more",
        _MODULES,
    ),
    Row(
        "rms_norm: before attention and MLP, the last, query and key heads",
        _OPERATOR.format("rms_norm"),
        "x, weight; epsilon is none",
        "the norm itself, epsilon inside of the root",
        "none",
        "closed form in FP32; dX and the weight's gradient rounded once",
        "x and weight; the statistics are made again in FP32, from the forward's x",
        f"{_ITS_OWN}, n = row or rows; also at rows of zeros and at 2⁻¹⁰, where epsilon counts",
        _MODULES,
    ),
    Row(
        "rotary_embedding",
        _OPERATOR.format("rotary_embedding") + "; the table rounded to the dtype",
        "query, key; the table is none",
        "the rotation by the rounded cosines and sines",
        "positions",
        "the same operator by the opposite angle",
        "positions and table",
        f"{_ITS_OWN}, n = 3; positions from 0, 5 and 1000",
        _MODULES,
    ),
    Row(
        "silu_and_mul",
        _OPERATOR.format("silu_and_mul"),
        "gate and up, one tensor",
        "gate · sigmoid(gate) · up",
        "none",
        "closed form in FP32, rounded once",
        "the input",
        f"{_ITS_OWN}, n = 6; where the sigmoid is near 1 its rounding counts as the floor's",
        _MODULES,
    ),
    Row(
        "attention",
        _OPERATOR.format("attention") + "; causal, grouped heads, LSE by the natural logarithm",
        "query, key, value",
        "softmax(q · kᵀ · scale) · v; a key head's gradient is the sum over its group",
        "the causal mask",
        "torch's flash backward from the forward's own output and LSE",
        "query, key, value, output, LSE; recomputation makes the last two again with their bits",
        f"{_ITS_OWN}, n = keys of a group; probabilities are known to one rounding",
        _MODULES,
    ),
    Row(
        "selected_log_prob",
        _OPERATOR.format("selected_log_softmax") + "; logits are the output layer's, widened to FP32",
        "logits",
        "log-softmax at the label; padding has a cotangent of zero",
        "labels, token mask",
        "closed form in FP32: one at the label less the probabilities",
        "logits, labels, LSE",
        f"{_ITS_OWN}, n = vocabulary",
        (*_MODULES, *_SPECIMEN),
    ),
    Row(
        "embedding, alone and tied to the output layer",
        "rows of the weight; torch's",
        "weight, once for both uses",
        "the sum over all uses of a row, as embedding and as output layer",
        "tokens",
        "torch's; a shared weight adds both up",
        "tokens",
        f"{_ITS_OWN}, n = uses or vocabulary",
        (*_MODULES, *_MODEL),
    ),
    Row(
        "residual sum",
        "torch's sum in the dtype",
        "both terms",
        "identity",
        "none",
        "torch's",
        "nothing",
        "in the decoder layer and in the model, whose references are shown what each operator computed",
        _MODEL,
    ),
    Row(
        "main parameter: one step",
        "main in FP32 → master in bf16, by rounding",
        "each main that the optimizer holds; a frozen one is not in it, or has no gradient at all",
        "identity: dmain = dmaster",
        "none",
        "micro batches add up in FP32; Megatron's clipping and AdamW with decoupled decay",
        "Adam's moments",
        "the change of each main beside AdamW in FP64 from the reference's gradients, whose noise is the floor",
        (*_MODEL, f"{_UNIT}::test_a_frozen_parameter_that_decays_is_told_and_one_that_is_frozen_is_not"),
    ),
    Row(
        "quantized linear, `default`",
        "quantized x and weight; FP8 blocks, FP8 tensor, MXFP8, NVFP4",
        "x, weight, bias; scales are stop-gradient",
        "identity STE on both, saturated values too; dX of the weight and dW of the x that are quantized along what is "
        "summed, both of the quantized gradient; the bias of the unquantized one",
        "codes and scales, of the forward and of the gradient",
        "products of decoded values, FP64 in the reference, one rounding",
        "x and weight, or their copies that are quantized along the other dimension",
        "the bridge with those codes fixed; floor · (2 + √n · 2⁻²⁴ / u)",
        (
            f"{_UNIT}::test_a_right_module_is_not_accused",
            f"{_QUANTIZED}::test_the_modes_distances_are_those_seen_on_an_h200",
        ),
    ),
    Row(
        "quantized linear, `unquant`",
        "as `default`, bit for bit",
        "as `default`",
        "dX of the master weight, dW of the original x: no exact derivative of the forward, so layer 2 measures it",
        "codes and scales of the forward",
        "high-precision products",
        "x and weight as they came; no quantized copy need live",
        "as `default`",
        (f"{_QUANTIZED}::test_each_mode_multiplies_what_it_says", *_SPECIMEN),
    ),
    Row(
        "quantized linear, `dequant`",
        "as `default`, bit for bit",
        "as `default`",
        "identity STE on both; dX of dequant(weight), dW of dequant(x): the forward's values, rounded to the dtype",
        "codes and scales of the forward",
        "high-precision products",
        "the quantized x and weight; neither the original nor one quantized anew or by another block",
        "as `default`",
        (f"{_QUANTIZED}::test_each_mode_multiplies_what_it_says", *_SPECIMEN),
    ),
    Row(
        "router (no row in the aligned spec yet)",
        "softmax, the routes' probabilities, normalized",
        "x, weight",
        "the normalized probabilities of the given routes, gathered from the whole softmax",
        "routes: chosen or replayed, ties as the forward broke them",
        "closed form; never detached, never of scores that were zeroed",
        "probabilities, routes",
        _ITS_OWN,
        _SPECIMEN,
    ),
    Row(
        "routed experts (no row in the aligned spec yet)",
        "dispatch, SwiGLU of each expert, weighted sum; a shared expert beside",
        "x, both weights of each expert, probabilities",
        "the sum over a token's routes, also where one expert is taken twice",
        "routes and their order",
        "glue around products; the inverse of the dispatch permutation adds a token's routes up",
        "what each expert got, its first product and output",
        f"{_ITS_OWN}; an expert without tokens has a gradient of zero",
        _SPECIMEN,
    ),
)


def text() -> str:
    """The generated part of the document: two tables, a row a module class in each."""
    what = [(r.module, r.visible, r.trainable, r.surrogate, r.discrete) for r in ROWS]
    how = [(r.module, r.backward, r.saved, r.accepted, names(r.tests)) for r in ROWS]
    return "\n".join(
        (
            *table(("module class", "visible forward", "trainable", "surrogate", "discrete state"), what),
            "",
            *table(("module class", "backward", "saved, recomputed", "reference and tolerance", "tests"), how),
        )
    )


def tests() -> list[tuple[str, tuple[str, ...]]]:
    """What each row is of, and the tests that it names."""
    return [(row.module, row.tests) for row in ROWS]


BACKWARD = Catalogue("backward-contract.md", text, tests)
