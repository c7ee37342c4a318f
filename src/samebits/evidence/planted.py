"""The document that `samebits check planted` leaves: for each seed what was planted, and what was named for it."""

from samebits.errors import SamebitsError

from .document import Kind


class PlantedError(SamebitsError):
    """Planted faults that cannot be believed: the file, what is wrong with it, what to do."""


KIND = Kind("planted-1", PlantedError, "run `samebits check planted`")
