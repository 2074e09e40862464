"""The connection to a worker's executor. Runs on the master."""

from __future__ import annotations

from ddlf.errors import ExecutorCrashed
from ddlf.rpc.channel import Channel


class DataChannel(Channel):
    """A channel to an executor, which may crash.

    Attributes:
        pid: Process id of the executor, once it has answered.
        crash_before: The last crash that was known when the master dialled the executor.
    """

    pid: int | None = None
    crash_before: ExecutorCrashed | None = None

    def is_explained_by(self, crash: ExecutorCrashed | None) -> bool:
        """Return whether the crash is this executor's.

        The daemon may report the crash of the previous executor after the master has reached this one.
        """
        if crash is None or crash is self.crash_before:
            return False
        return self.pid is None or crash.pid in (None, self.pid)
