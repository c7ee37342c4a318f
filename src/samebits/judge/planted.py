"""Planted faults, judged again: the module and operator that were named must be those of the fault, and in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .localise import layer_of

SEEDS = tuple(range(100, 120))  # of what is committed
SECONDS = 60.0  # that a seed may take: an unchanged run, a faulty one, and both comparisons
KINDS = ("weight", "operator", "epsilon")
_PLACE = ("layer", "module", "operator", "call")


def operators_of(arm: int, kind: str, module: str) -> tuple[tuple[str, int], ...]:
    """The operator, and its call, in which a fault in a module's weight or epsilon first shows on a CPU: one of these.

    The modules are those of a decoder layer of Qwen3 that have a weight. At BI=1 each is one operator of the contract.
    At BI=0 a norm is spelled out: epsilon is added to the variance, after the residual if there is one, and the weight
    is the factor of the second product; a linear is torch's or, on processors that have bf16 products, oneDNN's.
    """
    if not module.endswith("norm"):
        names = ("batch_invariant.linear.default",) if arm else ("aten.linear.default", "_C.onednn_mm.default")
        return tuple((name, 0) for name in names)
    residual = module.endswith("post_attention_layernorm") or (
        module.endswith("input_layernorm") and layer_of(module) != 0
    )
    if arm:
        return ((f"batch_invariant.{'add_' if residual else ''}rms_norm.default", 0),)
    return (("aten.mul.Tensor", 1) if kind == "weight" else ("aten.add.Tensor", int(residual)),)


def is_right(truth: Mapping[str, Any], named: Mapping[str, Any] | None) -> bool:
    """Whether the layer, the module, the operator and its call are the planted ones; an operator None is any."""
    if named is None:
        return False
    free = () if truth["operator"] is not None else _PLACE[2:]
    return all(named[key] == truth[key] for key in _PLACE if key not in free)


def missed(document: Mapping[str, Any], seeds: tuple[int, ...] | None = SEEDS) -> list[str]:
    """What is wrong with a document of `samebits check planted`, one text each. seeds: each arm's; None: any."""
    found = []
    for arm, tried in document["arms"].items():
        rows, contract = tried["seeds"], document["executions"][arm].get("contract")
        if bool(contract) != (arm == "1"):
            found.append(f"BI={arm} computed by {contract or 'no contract'}")
        if seeds is not None and [row["seed"] for row in rows] != list(seeds):
            found.append(f"BI={arm}: not the seeds {seeds[0]} to {seeds[-1]}")
        on_cpu = document["executions"][arm]["device"] == "cpu"
        found += [f"BI={arm}, seed {row['seed']}: {what}" for row in rows for what in _wrong(int(arm), row, on_cpu)]
    if seeds is not None and set(document["arms"]) != {"0", "1"}:
        found.append(f"tried at BI={' and '.join(document['arms'])} only")
    return found


def _is_of_its_module(arm: int, truth: Mapping[str, Any]) -> bool:
    """Whether the planted operator is the one in which such a fault shows; one that was itself planted in is."""
    if truth["kind"] == "operator":
        return truth["operator"] is not None
    return (truth["operator"], truth["call"]) in operators_of(arm, truth["kind"], truth["module"])


def _wrong(arm: int, row: Mapping[str, Any], on_cpu: bool) -> list[str]:
    truth, wrong = row["truth"], []
    if truth["kind"] != KINDS[row["seed"] % len(KINDS)]:
        wrong.append(f"a fault of kind {truth['kind']}")
    elif on_cpu and not _is_of_its_module(arm, truth):
        wrong.append(f"{truth['operator']} is not the operator of {truth['module']}")
    if not is_right(truth, row["named"]):
        wrong.append("the planted fault was not named")
    if row["right"] != (is_right(truth, row["named"]) and row["unchanged"] is None):
        wrong.append(f"right is {row['right']}")
    if row["unchanged"] is not None:
        wrong.append("the unchanged run was accused")
    if row["seconds"] > SECONDS:
        wrong.append(f"took {row['seconds']} s, more than {SECONDS:.0f}")
    return wrong
