"""The public base of every error that Perilune raises on purpose."""


class Error(ValueError):
    """A request that cannot be served: the message names the field, the value and what is allowed."""


__all__ = ["Error"]
