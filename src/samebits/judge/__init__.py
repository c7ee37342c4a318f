"""The judge: what the recorded capsules of a run prove, and what they do not.

It imports numpy, `samebits.evidence` and the standard library, never an engine, a trainer or a patch: what it
judges cannot change how it judges. What computes references of gradients (`vjp`, `modules`, `quantized`, `updates`,
`conventions`) imports torch besides, and is imported by name.
"""

from .backward_modes import missed as missed_backward_modes
from .compare import Comparison, compare
from .engines import missed as missed_engines
from .invariance import judge_recordings, matrix_rows, matrix_summary, rejudge_matrix
from .operators import missed as missed_operators
from .planted import missed as missed_faults
from .products import missed as missed_products
from .speed import missed as missed_speed
from .verdict import JudgeError, judge_run, read_bounds, rejudge, summary

__all__ = [
    "Comparison",
    "JudgeError",
    "compare",
    "judge_recordings",
    "judge_run",
    "matrix_rows",
    "matrix_summary",
    "missed_backward_modes",
    "missed_engines",
    "missed_faults",
    "missed_operators",
    "missed_products",
    "missed_speed",
    "read_bounds",
    "rejudge",
    "rejudge_matrix",
    "summary",
]
