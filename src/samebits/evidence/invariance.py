"""The document that `samebits check bits` leaves: counts for each cell of the matrix, and the verdict they support."""

from samebits.errors import SamebitsError

from .document import Kind


class InvarianceError(SamebitsError):
    """A matrix that cannot be believed: the file, what is wrong with it, what to do."""


KIND = Kind("invariance-1", InvarianceError, "run `samebits check bits`")
