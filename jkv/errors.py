"""The one exception type that jkv raises on purpose."""

__all__ = ["JkvError"]


class JkvError(ValueError):
    """Something the caller can put right: a bad argument, file or combination.

    The message names the argument, the value it had and what would have been accepted, in one line, so the command
    line can print it as it is and exit with code 2.
    """
