"""Kill a process at a chosen call, like ``kill -9``. The code that a test runs in a child process uses this."""

import os
import signal


def dies_after(calls, names):
    """Let this process kill itself at call number ``calls + 1`` of the functions of ``os`` with these names."""

    def count(real):
        def call(*args, **more):
            nonlocal calls
            calls -= 1
            if calls < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    for name in names:
        setattr(os, name, count(getattr(os, name)))
