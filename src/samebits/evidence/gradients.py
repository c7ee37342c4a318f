"""The documents that `samebits check gradients` and `samebits check conventions` leave: gradients beside references."""

from samebits.errors import SamebitsError

from .document import Kind


class GradientsError(SamebitsError):
    """Gradients that cannot be believed: the file, what is wrong with it, what to do."""


KIND = Kind("gradients-1", GradientsError, "run `samebits check gradients`")
CONVENTIONS = Kind("conventions-1", GradientsError, "run `samebits check conventions`")
