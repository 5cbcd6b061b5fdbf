"""The one error that jkv raises for bad input."""


class JkvError(ValueError):
    """Bad input. The message names the argument, its value and what is allowed; nothing was done yet."""
