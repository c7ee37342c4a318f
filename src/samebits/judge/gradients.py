"""What `samebits check gradients` must have compared, and whether a document shows it: layer 1, judged again.

The list of what is asked is here: a document that lacks a module, a dtype, a cotangent or a planted fault is no pass,
and neither is one in which a right module is accused or a wrong one is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from .modules import MODULES
from .vjp import DIFFERENCES, Cotangent

COTANGENTS: tuple[Cotangent, ...] = ("random", "zero", "sparse")
assert set(COTANGENTS) < set(get_args(Cotangent))
DTYPES = ("bfloat16", "float32")
WAYS = ("as it is", "recomputed", "autocast")
SEEDS = 100  # of what is committed
LEAST_FAULTS, LEAST_UNSEEN = 15, 3  # planted; of them, those that y.sum().backward() alone does not see

# Module classes by who computes them.
MEGATRON = (
    "linear", "rms_norm", "rotary_embedding", "silu_and_mul", "attention", "selected_log_prob", "embedding",
    "tied embedding",
)  # fmt: skip
COMPOSITES = ("mlp", "self attention", "decoder layer")
MODELS = ("model", "model, update", "model, tied", "model, tied, update")
SPECIMENS = tuple(name for name in MODULES if name != "linear")

# Of what seed 000 lists in its step 5, what no row here shows.
NOT_COVERED = (
    "CUDA graphs, and every implementation on a card",
    "parallel reduction: tensor, sequence, context, expert and pipeline parallel ranks; one rank is run",
    "packed sequences: the aligned layer spec refuses them",
    "mixture of experts in Megatron Core: the aligned layer spec refuses it; routers and experts here are specimens",
    "linear attention and SSM: no module of the aligned model",
    "FP16 and loss scaling",
    "NVFP4's random Hadamard transform and stochastic rounding in the mode default",
    "Transformer Engine's modules: they need a card; the quantized linear here is the reference of its modes",
)


def missed(document: Mapping[str, Any], seeds: int | None = SEEDS) -> list[str]:
    """What is wrong with a document of `samebits check gradients`, one text each. seeds: the fewest; None: any."""
    found = []
    if seeds is not None and document["seeds"] < seeds:
        found.append(f"{document['seeds']} seeds, fewer than {seeds}")
    rows = {(row["of"], row["module"], row["dtype"]) for row in document["rows"]}
    for of, names in (("Megatron Core", (*MEGATRON, *COMPOSITES, *MODELS)), ("specimen", SPECIMENS)):
        for name in names:
            for dtype in DTYPES:
                if (of, name, dtype) not in rows:
                    found.append(f"{of}, {name}, {dtype}: was not asked")
    for row in document["rows"]:
        found += [f"{_place(row)}: {text}" for text in _row(row)]
    found += _judge_itself(document)
    found += _faults(document)
    return found


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['of']}, {row['module']}, {row['dtype']}, {row['tensor']}"


def _row(row: Mapping[str, Any]) -> list[str]:
    found = []
    if row["wrong"]:
        found.append(f"{row['wrong']} of {row['compared']} gradients are wrong, the first: {row['first_wrong']}")
    worst = row["worst"]
    if worst is not None and not worst["relative"] <= worst["tolerance"] and not row["wrong"]:
        found.append(f"an error of {worst['relative']:.3g}, {worst['tolerance']:.3g} is the most")
    # A floor may hide a case, but not every one.
    if row["compared"] == row["zero"] + row["unresolved"] or worst is None:
        found.append("no comparison tells anything")
    if row["of"] == "specimen" or row["module"] in MEGATRON:
        must = set(COTANGENTS) | ({"recorded"} if _is_recorded(row) else set())
        if lacks := must - set(row["cotangents"]):
            found.append(f"without cotangents {', '.join(sorted(lacks))}")
        lacks = set(MODULES[row["module"]].cases) - set(row["cases"])
        if lacks and not row["tensor"].startswith("shared_"):  # a shared expert is a case of its own
            found.append(f"without the cases {', '.join(sorted(lacks))}")
    judged = row["of"] == "Megatron Core" and row["module"] in (*MEGATRON, *COMPOSITES)
    if judged and (lacks := set(WAYS) - set(row["ways"])):
        found.append(f"not {', '.join(sorted(lacks))}")
    return found


def _is_recorded(row: Mapping[str, Any]) -> bool:
    """Whether a training step calls this; of logits it takes the FP32 ones that Megatron widens."""
    if row["of"] != "Megatron Core" or row["module"] in ("embedding", "tied embedding"):
        return False
    return row["module"] != "selected_log_prob" or row["dtype"] == "float32"


def _judge_itself(document: Mapping[str, Any]) -> list[str]:
    found = [
        f"{row['of']}, {row['module']}: its forward is not the surrogate's: off by {row['error']:.3g}"
        for row in document["forwards"]
        if not row["error"] <= row["allowed"]
    ]
    found += [
        f"{row['module']}: the reference is off from finite differences by {row['error']:.3g}"
        for row in document["differences"]
        if not row["error"] <= DIFFERENCES
    ]
    smooth = {name for name, module in MODULES.items() if module.smooth}
    if lacks := smooth - {row["module"] for row in document["differences"]}:
        found.append(f"no finite differences of {', '.join(sorted(lacks))}")
    if lacks := {*MEGATRON, *SPECIMENS} - {row["module"] for row in document["forwards"]}:
        found.append(f"no forward of {', '.join(sorted(lacks))}")
    return found


def _faults(document: Mapping[str, Any]) -> list[str]:
    found = []
    faults, in_place = document["faults"], document["in_place"]
    if len({row["fault"] for row in faults}) < LEAST_FAULTS:
        found.append(f"{len(faults)} faults were planted, fewer than {LEAST_FAULTS}")
    for row in faults:
        if not row["caught"] or row["named"] != sorted(row["tensors"]):
            said = ", ".join(row["named"]) or "nothing"
            found.append(f"{row['fault']} in {row['module']}: named {said}, it is {', '.join(row['tensors'])}")
    unseen = [row["fault"] for row in faults if not row["by_sum"]]
    if len(unseen) < LEAST_UNSEEN:
        found.append(f"y.sum().backward() misses {len(unseen)} faults: they try too little")
    if not in_place:
        found.append("no fault was planted into a training step")
    for row in in_place:
        must = sorted(f"{row['module']}: {tensor}" for tensor in row["tensors"])
        if row["named"] != must:
            said = "; ".join(row["named"]) or "nothing"
            found.append(f"{row['fault']} in a training step: named {said}, it is {'; '.join(must)}")
    return found
