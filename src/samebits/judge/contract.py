"""The numerical contract as a table: what each operator computes, in which order, and which test proves it.

`docs/numerical-contract.md` carries the table between two markers; `samebits check contract` compares it, and the
tests that the rows name, with what is there. An implementation may take another's place only if it passes its row.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import SamebitsError

NAMESPACE = "batch_invariant"
NAME = "batch-invariant-cpu-1 lanes16 kv64 fma x86-64-v3"
CUDA_NAME = "batch-invariant-cuda-1 sm_90 k16-chain fa3-kv128 lanes512"
# What a library says of itself, or is told, as operators.
NOT_ARITHMETIC = frozenset({"contract", "instruction_set", "let_cublaslt"})
BEGIN, END = "<!-- begin: made by `samebits check contract --write` -->", "<!-- end -->"

_TESTS = "tests/integration/test_operators_cpu.py"
_INVARIANCE = (
    f"{_TESTS}::test_a_row_is_the_same_in_every_batch",
    f"{_TESTS}::test_each_row_alone_is_the_row_of_the_batch",
    f"{_TESTS}::test_threads_change_nothing",
)
_ROW_TESTS = (*_INVARIANCE, f"{_TESTS}::test_bits_are_the_references", f"{_TESTS}::test_accuracy_against_fp64")
_SUM = "fp32, 16 lanes: lane l sums elements l, l + 16, …{}; then halves of the lanes are added until one is left"
_ROWS = "the other rows, their number and order, threads, row strides, vector width"
_CPU = "CPU: C++, AVX2 and AVX-512"


class ContractError(SamebitsError):
    """A table and a document, or a table and the tests, that do not agree."""


@dataclass(frozen=True)
class Row:
    """One operator. dtypes: inputs to outputs. order: what is accumulated, in which dtype and order. casts: where a
    value is rounded or widened. fixed: what an implementation may not change. free: what it may. tests: each as
    FILE::FUNCTION."""

    operator: str
    dtypes: str
    order: str
    casts: str
    fixed: str
    free: str
    implementations: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Apart:
    """What torch computes on both sides, outside of the operators. what: the quantity. how: its arithmetic. why: what
    keeps both sides' bits alike. tests: each as FILE::FUNCTION."""

    what: str
    how: str
    why: str
    tests: tuple[str, ...]


def _test(*names: str) -> tuple[str, ...]:
    return tuple(f"{_TESTS}::test_{name}" for name in names)


ROWS = (
    Row(
        "linear",
        "bf16 or fp32, weight and bias alike → the same",
        _SUM.format(" by fused multiply-adds, from +0"),
        "inputs widened exactly; the bias added in fp32; one rounding to the output",
        "16 lanes over all of K (filled up with zeros), the tree, no split of K",
        _ROWS + ", tiles over rows and columns, the other columns",
        _CPU,
        (
            *_ROW_TESTS,
            *_test("a_column_of_a_linear_is_its_own", "linears_bits_are_those_of_16_lanes"),
            "tests/cases/test_te_2986.py::test_a_row_is_the_same_at_every_m",
        ),
    ),
    Row(
        "rms_norm",
        "bf16 or fp32, gain alike → the same",
        _SUM.format(" squared, by fused multiply-adds"),
        "1 / sqrt(sum / D + epsilon) in fp32; x times that, times the gain; one rounding",
        "16 lanes, the tree, the order of the two products",
        _ROWS,
        _CPU,
        _ROW_TESTS,
    ),
    Row(
        "add_rms_norm",
        "bf16 or fp32, residual and gain alike → norm and sum, the same",
        "as rms_norm, of the rounded sum",
        "x + residual in fp32, rounded; the norm as rms_norm",
        "the norm is taken of the rounded sum",
        _ROWS + ", whether the two steps are fused",
        _CPU,
        (*_ROW_TESTS, *_test("add_rms_norm_is_the_sum_then_the_norm")),
    ),
    Row(
        "rotary_embedding",
        "int64 positions; query and key in bf16 or fp32; cosines and sines of any float dtype → query and key",
        "none: fma(a, cos, -(b · sin)) and fma(b, cos, a · sin), a and b the halves of a head",
        "all widened to fp32; one rounding",
        "which product is fused",
        _ROWS + ", heads flat or apart",
        _CPU,
        (*_ROW_TESTS, *_test("rotary_takes_heads_flat_or_apart_and_any_cache_dtype")),
    ),
    Row(
        "silu_and_mul",
        "bf16 or fp32 → the same, half as wide",
        "none: gate / (1 + exp(-gate)) · up",
        "in fp32, exp the contract's own; one rounding",
        "the polynomial of exp, the division before the product",
        _ROWS,
        _CPU,
        _ROW_TESTS,
    ),
    Row(
        "attention",
        "bf16 or fp32 → output the same, LSE (natural logarithm) fp32",
        "a score: one fused multiply-add after another over the head's dimensions. Keys in blocks of 64 from the "
        "sequence's start: the running maximum, the block's exp summed in 16 lanes and a tree, then "
        "output · exp(old - new maximum) and one fused multiply-add a key, in order",
        "inputs widened exactly; scores times the scale, probabilities, sums and output in fp32; output / sum, one "
        "rounding; LSE = maximum + log(sum)",
        "the block of 64 keys, counted from the sequence's start; the order within; no split of the keys",
        "the other requests, which tokens are new (decode, prefill, chunks), threads, the cache's block size, block "
        "order and strides, tiles over queries, heads side by side",
        _CPU,
        (
            *_test(
                "decode_is_prefill_is_chunked_prefill",
                "neighbours_change_nothing",
                "the_caches_layout_changes_nothing",
                "a_query_head_reads_its_key_head_alone",
                "attentions_bits_are_the_references",
                "attentions_accuracy_against_fp64",
            ),
            "tests/cases/test_vllm_51902.py::test_a_neighbours_tenth_token_changes_nothing",
        ),
    ),
    Row(
        "reshape_and_cache",
        "bf16 or fp32 → the caches, in place",
        "none",
        "none: bits are copied",
        "slot = block · block size + offset; negative slots are skipped",
        "the cache's strides",
        _CPU,
        _test("reshape_and_cache_writes_each_token_into_its_slot"),
    ),
    Row(
        "log_softmax",
        "bf16 or fp32 → fp32",
        "the row's maximum; " + _SUM.format(" of exp(x - maximum)"),
        "(x - maximum) - log(sum) in fp32, exp and log the contract's own",
        "16 lanes, the tree, the order of the two differences",
        _ROWS,
        _CPU,
        _ROW_TESTS,
    ),
    Row(
        "selected_log_softmax",
        "bf16 or fp32 and int64 indices → that entry and the LSE, fp32",
        "as log_softmax",
        "as log_softmax; LSE = maximum + log(sum)",
        "the entry's bits are log_softmax's",
        _ROWS,
        _CPU,
        (*_ROW_TESTS, *_test("selected_log_softmax_is_an_entry_of_log_softmax")),
    ),
)


_EVIDENCE = "tests/unit/test_committed_evidence.py"
_ADMITTED, _DECODE = "tests/integration/test_admitted_linear.py", "tests/integration/test_decode_attention.py"
_PRODUCTS = (
    f"{_EVIDENCE}::test_no_element_of_an_admitted_product_differs_on_a_card_and_what_serves_is_faster_than_cublas"
)
_ON_A_CARD = (
    f"{_EVIDENCE}::test_no_element_of_an_operator_differs_on_a_card",
    f"{_EVIDENCE}::test_on_a_card_the_whole_matrix_has_no_mismatch_in_the_invariant_arm_and_some_in_the_other",
)
_LANES = (
    "fp32, 512 lanes: lane (i / 8) mod 512 takes element i, in the order of i{}; lanes are added in groups of 32 at "
    "distances 16, 8, 4, 2, 1, then the groups at 8, 4, 2, 1"
)
_CARD_ROWS = "the other rows, their number and order, row strides, graphs, streams, how rows lie on processors"
_SM90 = "CUDA C++, sm_90a"

CUDA_ROWS = (
    Row(
        "linear",
        "bf16 → bf16",
        "sequential K: one chain of k16 steps of the tensor core from zero, in order, K filled up with zeros",
        "the fp32 sum rounded, a bias added to that and rounded again",
        "the chain; no split of K",
        "the other rows and columns, their number, tiles, depth, launch, library",
        "what is admitted by its bits for (N, K) and a number of rows: cuBLASLt without split-K, `gemm_bf16_skinny`, "
        "vLLM's Triton kernel where nothing else is; `reference_gemm` defines it",
        (
            _PRODUCTS,
            f"{_ADMITTED}::test_what_has_the_bits_serves_and_what_was_offered_last_serves_first",
            f"{_ADMITTED}::test_one_bit_at_one_number_of_rows_is_refused_there_and_named",
        ),
    ),
    Row(
        "skinny_gemm",
        "bf16, up to 64 rows → bf16 or fp32",
        "as linear",
        "as linear; as fp32 the sum itself, without a bias",
        "as linear",
        "as linear; the columns of a tile",
        _SM90,
        (_PRODUCTS, f"{_ADMITTED}::test_the_table_of_tiles_names_kernels_that_there_are_for_all_rows"),
    ),
    Row(
        "cublaslt_gemm",
        "bf16 → bf16",
        "as linear where it was admitted; elsewhere the library's own",
        "one rounding",
        "no split of K, no workspace for one",
        "the library's kernel",
        "cuBLASLt",
        (
            _PRODUCTS,
            "tests/integration/test_megatron_cuda.py::test_a_product_is_cublaslts_where_its_bits_are_the_references",
        ),
    ),
    Row(
        "rms_norm",
        "bf16, gain alike → bf16",
        _LANES.format(", squared, by fused multiply-adds"),
        "1 / sqrt(sum / D + epsilon) in fp32; x times that, times the gain; one rounding",
        "512 lanes, the tree, the order of the two products",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "add_rms_norm",
        "bf16, residual and gain alike → norm and sum, bf16",
        "as rms_norm, of the rounded sum",
        "x + residual in fp32, rounded; the norm as rms_norm",
        "the norm is taken of the rounded sum",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "rotary_embedding",
        "int64 positions; query and key in bf16, heads of 128; cosines and sines in bf16 → query and key",
        "none: fma(a, cos, -(b · sin)) and fma(b, cos, a · sin), a and b the halves of a head",
        "all widened to fp32; one rounding",
        "which product is fused",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "norm_rotary_embedding",
        "as rotary_embedding, and a gain for query and key → query and key",
        "rms_norm of each head, then rotary_embedding",
        "the norm rounded, then as rotary_embedding",
        "the rounding between the two",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "silu_and_mul",
        "bf16 → bf16, half as wide",
        "none: gate · rcp(1 + ex2(-gate · log2 e)) · up",
        "in fp32, ex2 and rcp the card's own; one rounding",
        "the order of the products",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "log_softmax",
        "bf16 or fp32 → fp32",
        "the row's maximum; " + _LANES.format(", exp(x - maximum)"),
        "(x - maximum) - log(sum) in fp32, exp and log the contract's own",
        "512 lanes, the tree, the order of the two differences",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "selected_log_softmax",
        "bf16 or fp32 and int64 indices → that entry and the LSE, fp32",
        "as log_softmax",
        "as log_softmax; LSE = maximum + log(sum)",
        "the entry's bits are log_softmax's",
        _CARD_ROWS,
        _SM90,
        _ON_A_CARD,
    ),
    Row(
        "decode_attention",
        "bf16, one token a request, heads of 128; the caches, written in place → output, bf16",
        "FlashAttention 3's without splits: blocks of 128 keys from the last to the first, a score one chain of k16 "
        "steps over the head, four sums of p, outputs one chain of k16 steps over bf16(p) and the values (below)",
        "as below; one rounding",
        "the blocks, counted from the sequence's start, their order, the four sums",
        "the other requests, pages, which processor takes a part",
        _SM90 + "; FlashAttention 3 as vLLM calls it at `VLLM_BATCH_INVARIANT=1` for every other step",
        (
            *_ON_A_CARD,
            f"{_DECODE}::test_a_kind_of_layer_is_admitted_by_its_bits",
            f"{_DECODE}::test_nothing_is_the_operators_before_its_bits_were_seen",
        ),
    ),
)


_ENGINES = "tests/integration/test_batch_invariant_cpu.py"
_ALIGNED = "tests/integration/test_megatron_aligned.py"

APART = (
    Apart(
        "temperature",
        "each logit, widened to fp32, divided by the request's temperature in fp32, one rounding; where that is 0 "
        "(greedy) no quotient is taken, or one by 1",
        "elementwise and IEEE: neither shape, stride nor width of a register enters",
        (
            f"{_ALIGNED}::test_the_temperature_divides_as_ieee_says",
            f"{_ENGINES}::test_the_sampler_computes_a_quotient_and_the_log_softmax",
            f"{_ENGINES}::test_the_trainer_scores_what_the_rollout_served",
        ),
    ),
    Apart(
        "RoPE table",
        "1 / base^(2i / D), times the position, its cos and sin: fp32, by torch's pow, cos and sin; one rounding to "
        "the model's dtype",
        "no name of a contract covers it: both sides run one torch, which the execution identity names, and a sync "
        "whose two tables have different hashes is refused",
        (
            f"{_ALIGNED}::test_the_rope_table_is_vllms",
            f"{_ENGINES}::test_the_trainer_scores_what_the_rollout_served",
        ),
    ),
    Apart(
        "residual sum",
        "the trainer's, in the model's dtype; the rollout's is in add_rms_norm",
        "elementwise: fp32, one rounding, as that row says",
        (f"{_ALIGNED}::test_no_other_kernel_computes", f"{_ALIGNED}::test_the_forward_is_the_operators"),
    ),
)


def text() -> str:
    """The generated part of the document: the arithmetic and its freedom, a row an operator in each; what is apart."""
    apart = [(row.what, row.how, row.why, names(row.tests)) for row in APART]
    return "\n".join(
        (
            f"CPU: `{NAME}`. All operators are `torch.ops.{NAMESPACE}.*`.",
            "",
            *_rows(ROWS),
            "",
            f"CUDA, Hopper: `{CUDA_NAME}`. The same names; the bits are those of the device family, not the CPU's.",
            "",
            *_rows(CUDA_ROWS),
            "",
            "What torch computes on both sides, and no operator does:",
            "",
            *table(("what", "arithmetic", "why the bits agree", "tests"), apart),
        )
    )


def _rows(rows: Sequence[Row]) -> list[str]:
    """Two tables of one device's operators: what is computed, and what may vary."""
    arithmetic = [(f"`{row.operator}`", row.dtypes, row.order, row.casts) for row in rows]
    proofs = [(f"`{row.operator}`", row.fixed, row.free, row.implementations, names(row.tests)) for row in rows]
    return [
        *table(("operator", "dtypes", "accumulation and order", "casts"), arithmetic),
        "",
        *table(("operator", "fixed", "may vary", "implementations", "tests"), proofs),
    ]


def names(tests: tuple[str, ...]) -> str:
    """Tests as a cell: file and function."""
    return "; ".join(f"`{test.rpartition('/')[2]}`" for test in tests)


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def tests() -> list[tuple[str, tuple[str, ...]]]:
    """What each row is of, and the tests that it names."""
    return [(row.operator, row.tests) for row in (*ROWS, *CUDA_ROWS)] + [(row.what, row.tests) for row in APART]


@dataclass(frozen=True)
class Catalogue:
    """A document under docs/ with a generated part. text: that part. tests: as `tests` above."""

    file: str
    text: Callable[[], str]
    tests: Callable[[], Iterable[tuple[str, tuple[str, ...]]]]


NUMERICAL = Catalogue("numerical-contract.md", text, tests)


def missing_tests(root: Path, catalogue: Catalogue = NUMERICAL) -> list[str]:
    """The tests that a row names and that are not there, as ROW: FILE::FUNCTION."""
    known: dict[str, set[str]] = {}
    missing = []
    for name, named in catalogue.tests():
        for test in named:
            file, _, function = test.partition("::")
            if file not in known:
                path = root / file
                tree = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
                known[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if function not in known[file]:
                missing.append(f"{name}: {test}")
    return missing


def check(document: Path, root: Path, catalogue: Catalogue = NUMERICAL) -> None:
    """ContractError unless the document's generated part is the catalogue's and each test that a row names is there."""
    if missing := missing_tests(root, catalogue):
        raise ContractError(
            f"the contract names tests that are not there: {', '.join(missing)}; correct the row's tests"
        )
    if _parts(document)[1] != catalogue.text():
        raise ContractError(f"{document}: is not of the table in the code; run `samebits check contract --write`")


def write(document: Path, catalogue: Catalogue = NUMERICAL) -> None:
    """Put the catalogue's text between the document's markers."""
    before, _, after = _parts(document)
    document.write_text(f"{before}{BEGIN}\n\n{catalogue.text()}\n\n{END}{after}", encoding="utf-8")


def _parts(document: Path) -> tuple[str, str, str]:
    whole = document.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    made, end, after = rest.partition(END)
    if not begin or not end:
        raise ContractError(f"{document}: the lines `{BEGIN}` and `{END}` are not both there; put them back")
    return before, made.strip(), after
