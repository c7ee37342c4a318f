"""Compares two release wheels' Python sources: the CPU build that we test with is the release that we ship.

Equal, but for the files that manifests/upstreams.toml lists; a listed file that is equal after all is an error too.
"""

import zipfile
from pathlib import Path

from samebits.sources.pins import Same


def differences(file: Path, reference: Path, same: Same) -> list[str]:
    """What speaks against `same`, one sentence each; [] if nothing does."""
    with zipfile.ZipFile(file) as ours, zipfile.ZipFile(reference) as theirs:
        mine, other = ({n for n in wheel.namelist() if n.endswith((".py", ".pyi"))} for wheel in (ours, theirs))
        unlike = {name for name in mine & other if ours.read(name) != theirs.read(name)}
    absent = other - mine
    allowed = {n for n in absent if any(n == a or (a.endswith("/") and n.startswith(a)) for a in same.absent)}
    idle = [a for a in same.absent if not any(n == a or n.startswith(a) for n in absent)]
    return [
        *(f"{name} is not in {reference.name}" for name in sorted(mine - other)),
        *(f"{name} differs from {reference.name}" for name in sorted(unlike - set(same.unlike))),
        *(f"{name} is missing" for name in sorted(absent - allowed)),
        *(f"{name} is listed as unlike, and is equal" for name in sorted(set(same.unlike) - unlike)),
        *(f"{name} is listed as absent, and is there" for name in sorted(idle)),
    ]
