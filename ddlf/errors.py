"""The error tree: every error that DDLF raises on purpose derives from ``DDLFError``. Used by master and workers."""


class DDLFError(Exception):
    """An error raised on purpose.

    Args:
        message: What happened, and where.
        hint: What to do next.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(DDLFError, ValueError):
    """A value that the caller chose cannot work."""
