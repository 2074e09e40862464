"""A process that dies at a moment that is counted, as by ``kill -9``. For code that tests run in processes of their own."""

import os
import signal


def dies_after(calls, names):
    """Kill this process when functions of ``os`` with these names have been called more than so many times."""

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
