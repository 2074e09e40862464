"""What the operating system says of a place, as a sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ddlf.errors import DatasetError, DDLFError
from ddlf.events.record import size


@contextlib.contextmanager
def explained(where: object, doing: str, *, need: int = 0) -> Iterator[None]:
    """Turn what the operating system says into a sentence.

    Args:
        where: What it happens to.
        doing: What is done, as ``"write to"``.
        need: Bytes that are wanted, for a full disk.

    Raises:
        DatasetError: In place of any OSError that is not DDLF's.
    """
    try:
        yield
    except DDLFError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            much = f"; {size(need)} are needed" if need else ""
            raise DatasetError(f"no space in {where}{much}", hint="free some, or name another folder") from error
        hint = "name another one" if error.errno == errno.EROFS else "look at its owner and mode"
        raise DatasetError(f"cannot {doing} {where}: {error.strerror or error}", hint=hint) from error
