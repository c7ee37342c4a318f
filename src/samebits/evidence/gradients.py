"""What `samebits check gradients`, `check conventions` and `run sft` leave: gradients beside references."""

from samebits.errors import SamebitsError

from .document import Kind


class GradientsError(SamebitsError):
    """Gradients that cannot be believed: the file, what is wrong with it, what to do."""


KIND = Kind("gradients-1", GradientsError, "run `samebits check gradients`")
SFT = Kind("sft-1", GradientsError, "run `samebits run sft`")
CONVENTIONS = Kind("conventions-1", GradientsError, "run `samebits check conventions`")
