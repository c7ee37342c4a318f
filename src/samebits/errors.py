"""The base of every error that a person can act on: its message names the thing, the place and the remedy.

The command line prints such an error as it is and exits with 1; any other exception is a defect, with a traceback.
"""


class SamebitsError(Exception):
    """What went wrong, where, and what to do about it."""
