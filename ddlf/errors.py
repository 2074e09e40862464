"""The error tree: everything DDLF raises on purpose derives from `DDLFError`. Runs everywhere."""


class DDLFError(Exception):
    """The root of all errors of this package.

    Args:
        message: What happened, and where.
        hint: What to do next.
        worker: The worker it happened on, as users know it; empty when it concerns none.
    """

    def __init__(self, message: str, *, hint: str = "", worker: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.worker = worker

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(DDLFError, ValueError):
    """The configuration, an option or a hyperparameter is wrong."""


class AuthError(DDLFError, PermissionError):
    """A token is missing, unusable or does not match."""
