"""Releases with the same Python sources: a difference that is not listed is told, and a listed one must exist."""

from pathlib import Path

import pytest
import toy

from samebits.sources.compare import differences
from samebits.sources.pins import Same

REFERENCE = {**toy.FILES, "toy/cuda/a.py": "", "toy/cuda/b.py": "", "toy/_version.py": "1"}
OURS = {**toy.FILES, "toy/_version.py": "2"}
LISTED = Same("", "", unlike=("toy/_version.py",), absent=("toy/cuda/",))


@pytest.mark.parametrize(
    ("ours", "same", "told"),
    [
        (OURS, LISTED, []),
        (OURS, Same("", "", absent=("toy/cuda/",)), ["toy/_version.py differs from"]),
        (OURS, Same("", "", unlike=("toy/_version.py",), absent=("toy/cuda/a.py",)), ["toy/cuda/b.py is missing"]),
        ({**OURS, "toy/mod.py": "evil"}, LISTED, ["toy/mod.py differs from"]),
        ({**OURS, "toy/more.py": ""}, LISTED, ["toy/more.py is not in"]),
        ({**OURS, "toy/_version.py": "1"}, LISTED, ["toy/_version.py is listed as unlike, and is equal"]),
        (REFERENCE, Same("", "", absent=("toy/cuda/",)), ["toy/cuda/ is listed as absent, and is there"]),
        ({**OURS, "toy/run.sh": "other"}, LISTED, []),
    ],
)
def test_what_differs_is_told(tmp_path: Path, ours: dict[str, str], same: Same, told: list[str]) -> None:
    mine, _ = toy.release(tmp_path / "ours", ours)
    reference, _ = toy.release(tmp_path / "reference", REFERENCE)
    found = differences(mine, reference, same)
    assert len(found) == len(told)
    assert all(one.startswith(expected) for one, expected in zip(found, told, strict=True))
