"""The template: executors are forks of this process. The launcher of local workers or a daemon starts it. Linux only.

Importing Keras and its backend takes seconds and about 260 MB. Forking a process that has imported them takes
milliseconds, and the memory is shared. Therefore one process of a machine imports them, and every executor is a fork of
it, at the start and after each crash. This process has no event loop, no thread and no user code.

The *bare* template has imported the modules that every executor needs. It never does anything slow. When Keras is
wanted, it forks a *warm* template. The warm template imports Keras, checks that it can be forked (``fork_danger``), and
serves the forks from then on. If the check fails, or while the warm template is not ready, executors are forks of the
bare one and import Keras themselves, like new processes. A warm template that is asked for more modules forks another
warm one in the same way.

A message is JSON with descriptors (``SCM_RIGHTS``) on one socket that all clients share. The first descriptor is a
socket for the answer.

- ``{"do": "preload", "modules": [...]}``: the answer is ``{"reason": ...}``. The reason is empty if executors start
  with these modules from now on.
- ``{"do": "fork", "cwd", "environment"}`` with the executor's channel, page, lifeline, stdout and stderr: the answer is
  ``{"pid", "modules"}``, and at the end of the process ``{"code"}``, negative for a signal. When the client closes the
  socket, the rest of the process and its group is killed. Only then can the system reuse its process id, so no other
  process is killed by mistake.

The template ends when the last client has closed its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

MESSAGE_BYTES = 65536
DESCRIPTORS = 6
"""Number of descriptors of a fork request. No other message has more."""
THREADS_END_S = 5.0
"""Maximum seconds during which the system may still show a thread that ended before a fork."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio", "/dev/neuron")
"""Devices that are open in a process with an accelerator. A fork of such a process could not use the accelerator."""

NO_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"
"""Keras imports pandas if it is installed, and pandas imports Arrow. Arrow's allocator starts a thread unless this
variable forbids it, and a process with such a thread is not forked. Without the thread, freed memory returns to the
system at the next allocation.
"""

READY = "ready"

MainFunction = Callable[[], Any]
"""The function that a fork runs after it has left the stack frames of its parent. It may return the next function to
run.
"""


def main(argv: list[str] | None = None) -> None:
    """Run as ``python -m ddlf.worker.template SOCKET_FD``."""
    (socket_fd,) = map(int, (argv or sys.argv)[1:2])
    requests = socket.socket(fileno=socket_fd)
    requests.set_inheritable(False)
    # Fail here, before a request needs this function, if the system does not have it.
    os.close(os.pidfd_open(os.getpid()))
    gc.disable()
    signal.signal(signal.SIGTERM, lambda *_: None)  # a scheduler sends it to all processes of a task; see ``executor``
    from ddlf.worker import executor  # noqa: F401 - every executor needs it

    freeze()
    main_function: MainFunction | None = Template(requests, []).serve
    while main_function is not None:
        main_function = main_function()


class Template:
    """The loop of one template: it reads requests, forks, and reports how the forks ended.

    Args:
        requests: The socket of the requests. They come from the clients for the bare template, and from the bare
            template for the warm one.
        imported: The preloaded modules that this process has imported.
    """

    def __init__(self, requests: socket.socket, imported: list[str]) -> None:
        self._requests = requests
        self._imported = imported
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._children: dict[int, Child] = {}  # each child under both of its descriptors
        self._warm_one: socket.socket | None = None
        self._warm_pid = 0
        self._modules: list[str] = []
        self._is_ready = False  # whether the warm template has imported its modules
        self._waiting: list[tuple[bytes, list[int]]] = []  # requests to preload
        self._failures: dict[tuple[str, ...], str] = {}

    def serve(self) -> MainFunction:
        """Serve until all clients are gone. Then this process ends.

        Returns:
            In a fork, the function that it runs.
        """
        while True:
            # Handle one event at a time: a handler may close a descriptor and open another one with the same number.
            fd, _ = self._poll.poll()[0]
            main_function: MainFunction | None = None
            if fd == self._requests.fileno():
                message, descriptors, _, _ = socket.recv_fds(self._requests, MESSAGE_BYTES, DESCRIPTORS)
                for descriptor in descriptors:  # processes that user code starts must not inherit them
                    os.set_inheritable(descriptor, False)
                if not message:
                    self._end_warm_one()
                    os._exit(0)
                main_function = self._handle(message, descriptors)
            elif self._warm_one is not None and fd == self._warm_one.fileno():
                self._hear_warm_one()
            elif fd in self._children:
                self._look_after(self._children[fd], fd)
            if main_function is not None:
                return main_function

    def _handle(self, message: bytes, descriptors: list[int]) -> MainFunction | None:
        """Handle a request and close its descriptors. A client whose request fails therefore sees the end of its
        socket.
        """
        request = json.loads(message)
        expected = DESCRIPTORS if request["do"] == "fork" else 1
        if len(descriptors) == expected:  # with fewer descriptors, the kernel had none left
            with contextlib.suppress(OSError):  # no memory, process number or descriptor is free
                if request["do"] == "preload":
                    return self._preload(request["modules"], message, descriptors)
                if not self._is_ready or not self._pass_on(message, descriptors):
                    return self._fork(request, descriptors)
        close(descriptors)
        return None

    # -- forks ------------------------------------------------------------------------------------------------------

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> MainFunction | None:
        pid = os.fork()
        if pid == 0:
            self._close_parents_files()
            return lambda: become_executor(request, descriptors, self._imported)
        child = Child(pid, socket.socket(fileno=descriptors[0]))
        self._children[child.pidfd] = self._children[child.reply.fileno()] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(child.reply, select.POLLIN)
        close(descriptors[1:])
        return None

    def _look_after(self, child: Child, fd: int) -> None:
        if fd == child.pidfd:
            self._poll.unregister(child.pidfd)
            tell(child.reply, {"code": child.code()})
            return
        # The client has gone, or knows that the process has ended. The other processes of its group end, too.
        self._poll.unregister(child.reply)
        with contextlib.suppress(KeyError):
            self._poll.unregister(child.pidfd)
        del self._children[child.pidfd], self._children[child.reply.fileno()]
        child.bury()

    def _close_parents_files(self) -> None:
        """Close the file descriptors that belong to the parent, in a new fork."""
        for child in set(self._children.values()):
            child.close_files()
        self._requests.close()
        if self._warm_one is not None:
            self._warm_one.close()
        for _, descriptors in self._waiting:
            close(descriptors)

    # -- the warm template -------------------------------------------------------------------------------------------

    def _preload(self, modules: list[str], message: bytes, descriptors: list[int]) -> MainFunction | None:
        """Let forks start with modules imported. The descriptors are closed after the answer."""
        if reason := self._failures.get(tuple(modules)):
            answer(descriptors, reason)
        elif set(modules) <= set(self._imported):
            answer(descriptors, "")
        elif not self._is_ready or not self._pass_on(message, descriptors):
            self._waiting.append((message, descriptors))
            if self._warm_one is None:
                return self._begin_warm_one(modules)
            return None
        else:
            close(descriptors)
        return None

    def _begin_warm_one(self, modules: list[str]) -> MainFunction | None:
        own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            own_end.close()
            self._close_parents_files()
            return lambda: warm_up(self._imported + modules, other_end, parent)
        other_end.close()
        self._warm_one, self._warm_pid, self._modules = own_end, pid, modules
        self._poll.register(own_end, select.POLLIN)
        return None

    def _hear_warm_one(self) -> None:
        assert self._warm_one is not None
        news = b""
        with contextlib.suppress(OSError):
            news = self._warm_one.recv(MESSAGE_BYTES)
        reason = news.decode() if news else "the process that imported it was ended"
        waiting, self._waiting = self._waiting, []
        if reason == READY:
            self._is_ready = True
        else:
            self._end_warm_one()
            if news:  # the same import would fail again
                self._failures[tuple(self._modules)] = reason
        for message, descriptors in waiting:
            if self._is_ready and self._pass_on(message, descriptors):
                close(descriptors)
            else:
                answer(descriptors, reason)

    def _end_warm_one(self) -> int:
        """End the warm template and return its exit code. Its forks continue."""
        if self._warm_one is None:
            return 0
        self._poll.unregister(self._warm_one)
        self._warm_one.close()  # ends the warm template, unless it is still importing
        if not self._is_ready:
            os.kill(self._warm_pid, signal.SIGKILL)
        self._warm_one, self._is_ready = None, False
        return os.waitstatus_to_exitcode(os.waitpid(self._warm_pid, 0)[1])

    def _pass_on(self, message: bytes, descriptors: list[int]) -> bool:
        assert self._warm_one is not None
        with contextlib.suppress(OSError):  # the client has gone
            socket.send_fds(self._warm_one, [message], descriptors)
            return True
        return False


class Child:
    """A fork of this template. It is kept until the client has received the exit code."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid = pid
        self.reply = reply
        self.pidfd = os.pidfd_open(pid)

    def code(self) -> int:
        """Return the exit code of this fork, which has ended, without releasing its process id."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def bury(self) -> None:
        """Kill the other processes in the group of this ended fork, and release its process id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # the process has no group yet
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.close_files()

    def close_files(self) -> None:
        """Close the file descriptors for this fork."""
        os.close(self.pidfd)
        self.reply.close()


def warm_up(modules: list[str], requests: socket.socket, parent: int) -> MainFunction:
    """Turn this fork of the bare template into a warm one: import the modules, check that this process can be forked,
    and return the loop to run.

    Args:
        modules: The modules to import.
        requests: Socket of the bare template's requests. This function sends ``READY`` to it, or why this process
            cannot be used.
        parent: Process id of the bare template.
    """
    from ddlf.worker.executor import die_with_parent

    die_with_parent(parent)
    gc.disable()
    os.environ.setdefault(*NO_THREAD)
    try:
        for name in modules:
            importlib.import_module(name)
        reason = fork_danger()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
    requests.send((reason or READY).encode()[:MESSAGE_BYTES])
    if reason:
        os._exit(1)
    freeze()
    return Template(requests, modules).serve


def freeze() -> None:
    """Keep forks from examining the present objects and modules, since every access would copy shared memory.

    The garbage collector of a fork skips the present objects, and the search for the user's modules skips the present
    modules. This process's own garbage collector skips them too. It is off during imports. It would take a fifth of the
    time and save a hundredth of the memory.
    """
    from ddlf.rpc.code import own_modules

    own_modules()
    gc.freeze()
    gc.enable()


def answer(descriptors: list[int], reason: str) -> None:
    """Answer a client's request to import modules; the reason is empty after success."""
    with socket.socket(fileno=descriptors[0]) as reply:
        tell(reply, {"reason": reason})


def tell(reply: socket.socket, facts: dict[str, Any]) -> None:
    """Send facts as JSON to a client of the template, if it still exists."""
    with contextlib.suppress(OSError):
        reply.send(json.dumps(facts).encode(), socket.MSG_DONTWAIT)


def close(descriptors: list[int]) -> None:
    """Close these file descriptors."""
    for fd in descriptors:
        os.close(fd)


def fork_danger() -> str:
    """Return why forks of this process would be less safe than new processes; empty if they are safe.

    A fork has no copies of the parent's threads, so a thread pool in it would wait for them indefinitely. Libraries
    that handle this, such as OpenBLAS, end their threads before each fork and start new ones on demand. This function
    therefore forks once, and checks the remaining threads.
    """
    devices = {path for path in open_files() if path.startswith(DEVICES)}
    if devices:
        return f"it has {', '.join(sorted(devices))} open"
    if threading.active_count() > 1:
        return f"it has the threads {', '.join(thread.name for thread in threading.enumerate())}"
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        return f"a fork ended with {code}"
    deadline = time.monotonic() + THREADS_END_S
    while (threads := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            return f"it has {threads} threads"
        time.sleep(0.001)
    return ""


def open_files() -> set[str]:
    """Return the paths of this process's open descriptors."""
    paths = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list itself
            paths.add(os.readlink(f"/proc/self/fd/{fd}"))
    return paths


def become_executor(request: dict[str, Any], descriptors: list[int], imported: list[str]) -> None:
    """Run like ``python -m ddlf.worker.executor`` in a fork that has already imported it."""
    from ddlf.worker import executor

    reply, channel, activity, lifeline, stdout, stderr = descriptors
    os.setsid()
    for fd, target in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    end_with(lifeline)
    with socket.socket(fileno=reply) as client:  # wait until the process has a group that can be killed
        tell(client, {"pid": os.getpid(), "modules": imported})
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if sys.path and sys.path[0] == os.getcwd():
        sys.path[0] = request["cwd"]  # as Python does for a module that it runs
    os.chdir(request["cwd"])
    # Make these as unpredictable as in a new process. All other random numbers come from the system.
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    executor.run(channel, activity)


def end_with(lifeline: int) -> None:
    """Let the kernel kill this process as soon as the other end of a pipe is closed in all processes, whatever this
    process is doing.

    This works like ``PR_SET_PDEATHSIG``, but depends on the daemon, which is not the parent of a fork. The kernel sends
    a chosen signal for events on a descriptor. Here the signal is SIGKILL, and the only event of this descriptor is its
    end.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(lifeline, 0)  # only POLLHUP
    if ended.poll(0):  # the other end of the pipe was closed before this request
        os._exit(0)


if __name__ == "__main__":
    main()
