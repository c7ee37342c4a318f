"""samebits: the policy that is trained and the policy that is served produce the same bits."""

__version__ = "0.1.0"
