"""Measurements: what `samebits bench` found, number by number, and what it was measured on, in one file each."""

from __future__ import annotations

from samebits.errors import SamebitsError

from .document import Kind


class MeasurementError(SamebitsError):
    """A measurement that cannot be believed: the file, what is wrong with it, what to do."""


BACKWARD = Kind("backward-1", MeasurementError, "measure")
BENCH = Kind("bench-1", MeasurementError, "measure")
ENGINES = Kind("engines-1", MeasurementError, "measure")
GEMM = Kind("gemm-1", MeasurementError, "measure")
OPERATORS = Kind("operators-1", MeasurementError, "measure")
STEPS = Kind("steps-1", MeasurementError, "measure")
