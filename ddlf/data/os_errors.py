"""Turns errors of the operating system into sentences about a location, the folder or URL of a data set."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ddlf.errors import DatasetError, DDLFError
from ddlf.events.record import size


@contextlib.contextmanager
def explained(where: object, doing: str, *, need: int = 0) -> Iterator[None]:
    """Turn an ``OSError`` in this ``with`` block into a ``DatasetError`` with a sentence for the user.

    Args:
        where: The affected location.
        doing: The attempted action, such as ``"write to"``.
        need: Bytes that are needed, for the message about a full disk; 0 if unknown.

    Raises:
        DatasetError: Replaces each OSError that is not an error of DDLF.
    """
    try:
        yield
    except DDLFError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"; {size(need)} are needed" if need else ""
            raise DatasetError(
                f"no space in {where}{needed}", hint="free some space, or name another folder"
            ) from error
        hint = "name another place" if error.errno == errno.EROFS else "check its owner and its mode"
        raise DatasetError(f"cannot {doing} {where}: {error.strerror or error}", hint=hint) from error
