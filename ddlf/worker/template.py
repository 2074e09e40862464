"""The process that executors are forked from. Started by the program that starts local workers, or by a daemon; Linux only.

To import Keras and its backend takes seconds and some 260 MB; to fork a process that has done it takes milliseconds, and the memory
is shared. So one process of a machine imports, and every executor is a fork of it, at the start and after each crash. It has no event
loop, no thread and no user code.

The *bare* template has imported what every executor needs; it never does anything that takes long. When Keras is wanted it forks a
*warm* one, which imports that, proves that it can be forked (``why_unsafe``) and forks from then on. If it cannot, or while it is not
ready, executors are forks of the bare one and import by themselves, as processes of their own do. A warm one that is asked for more
modules does the same again.

A message is JSON with descriptors (``SCM_RIGHTS``) on one socket that all clients share: the first descriptor is a socket for the answer.

- ``{"do": "preload", "modules": [...]}``: answered ``{"reason": ...}``, empty when executors come with these modules from now on.
- ``{"do": "fork", "cwd", "environment"}`` with the executor's channel, page, lifeline, stdout and stderr: answered ``{"pid",
  "modules"}``, and at its end ``{"code"}``, negative for a signal. When the client closes the socket, all that is left of the process
  and its group is killed. Only then its number can be given to another process, so that nobody kills a stranger.

It ends when the last client has closed its end.
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
"""Of a message that asks for a fork, the most of all."""
THREADS_END_S = 5.0
"""How long threads that end before a fork may still be seen after it."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio", "/dev/neuron")
"""What a process that uses an accelerator has open; a fork of it could not use that."""

NO_THREAD = "JE_ARROW_MALLOC_CONF", "background_thread:false"
"""Keras imports pandas where there is one, and that Arrow, whose allocator has a thread unless it is told otherwise: no process with one is forked.
Without it freed memory goes back when something is allocated."""

READY = "ready"

Life = Callable[[], Any]
"""What a fork is to do, after it has left the frames of the process it came from. It may return what it is to do then."""


def main(argv: list[str] | None = None) -> None:
    """Run as ``python -m ddlf.worker.template SOCKET_FD``."""
    (socket_fd,) = map(int, (argv or sys.argv)[1:2])
    requests = socket.socket(fileno=socket_fd)
    requests.set_inheritable(False)
    os.close(os.pidfd_open(os.getpid()))  # so that a system that lacks this is noticed before it is needed
    gc.disable()
    from ddlf.worker import executor  # noqa: F401 - what every executor needs

    freeze()
    life: Life | None = Template(requests, []).serve
    while life is not None:
        life = life()


class Template:
    """One template's loop: read requests, fork, say how the forks ended.

    Args:
        requests: Where they come from: of the bare template the clients, of the warm one the bare one.
        imported: What was to be preloaded and is, here.
    """

    def __init__(self, requests: socket.socket, imported: list[str]) -> None:
        self._requests = requests
        self._imported = imported
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._children: dict[int, Child] = {}  # by both descriptors
        self._warm_one: socket.socket | None = None
        self._warm_pid = 0
        self._modules: list[str] = []
        self._ready = False  # whether the warm one has imported them
        self._waiting: list[tuple[bytes, list[int]]] = []  # requests to preload
        self._failures: dict[tuple[str, ...], str] = {}

    def serve(self) -> Life:
        """Serve until all clients are gone, which ends this process.

        Returns:
            In a fork, what that is to do.
        """
        while True:
            # One at a time: what is done for it may close a descriptor and open another one of the same number.
            fd, _ = self._poll.poll()[0]
            life: Life | None = None
            if fd == self._requests.fileno():
                message, descriptors, _, _ = socket.recv_fds(self._requests, MESSAGE_BYTES, DESCRIPTORS)
                for descriptor in descriptors:  # what user code starts must not hold on to them
                    os.set_inheritable(descriptor, False)
                if not message:
                    self._end_warm_one()
                    os._exit(0)
                life = self._handle(message, descriptors)
            elif self._warm_one is not None and fd == self._warm_one.fileno():
                self._hear_warm_one()
            elif fd in self._children:
                self._look_after(self._children[fd], fd)
            if life is not None:
                return life

    def _handle(self, message: bytes, descriptors: list[int]) -> Life | None:
        """Do what was asked for, and close the descriptors; so a client whose request cannot be served sees the end of its socket."""
        request = json.loads(message)
        wanted = DESCRIPTORS if request["do"] == "fork" else 1
        if len(descriptors) == wanted:  # else the kernel had none left
            with contextlib.suppress(OSError):  # no memory, process number or descriptor left
                if request["do"] == "preload":
                    return self._preload(request["modules"], message, descriptors)
                if not self._ready or not self._pass_on(message, descriptors):
                    return self._fork(request, descriptors)
        close(descriptors)
        return None

    # -- forks ------------------------------------------------------------------------------------------------------

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> Life | None:
        pid = os.fork()
        if pid == 0:
            self._let_go()
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
        # Its client is gone, or has heard of the end: what is left of the group ends too.
        self._poll.unregister(child.reply)
        with contextlib.suppress(KeyError):
            self._poll.unregister(child.pidfd)
        del self._children[child.pidfd], self._children[child.reply.fileno()]
        child.bury()

    def _let_go(self) -> None:
        """Close, in a fork, what belongs to the process it came from."""
        for child in set(self._children.values()):
            child.let_go()
        self._requests.close()
        if self._warm_one is not None:
            self._warm_one.close()
        for _, descriptors in self._waiting:
            close(descriptors)

    # -- the warm one -----------------------------------------------------------------------------------------------

    def _preload(self, modules: list[str], message: bytes, descriptors: list[int]) -> Life | None:
        """Let forks have imported modules; the descriptors are closed when that is answered."""
        if reason := self._failures.get(tuple(modules)):
            answer(descriptors, reason)
        elif set(modules) <= set(self._imported):
            answer(descriptors, "")
        elif not self._ready or not self._pass_on(message, descriptors):
            self._waiting.append((message, descriptors))
            if self._warm_one is None:
                return self._begin_warm_one(modules)
            return None
        else:
            close(descriptors)
        return None

    def _begin_warm_one(self, modules: list[str]) -> Life | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            self._let_go()
            return lambda: warm_up(self._imported + modules, theirs, parent)
        theirs.close()
        self._warm_one, self._warm_pid, self._modules = ours, pid, modules
        self._poll.register(ours, select.POLLIN)
        return None

    def _hear_warm_one(self) -> None:
        assert self._warm_one is not None
        news = b""
        with contextlib.suppress(OSError):
            news = self._warm_one.recv(MESSAGE_BYTES)
        reason = news.decode() if news else "the process that imported it was ended"
        waiting, self._waiting = self._waiting, []
        if reason == READY:
            self._ready = True
        else:
            self._end_warm_one()
            if news:  # it would fail again
                self._failures[tuple(self._modules)] = reason
        for message, descriptors in waiting:
            if self._ready and self._pass_on(message, descriptors):
                close(descriptors)
            else:
                answer(descriptors, reason)

    def _end_warm_one(self) -> int:
        """End it; what it forked lives on. Returns how it ended."""
        if self._warm_one is None:
            return 0
        self._poll.unregister(self._warm_one)
        self._warm_one.close()  # which ends it, unless it is still importing
        if not self._ready:
            os.kill(self._warm_pid, signal.SIGKILL)
        self._warm_one, self._ready = None, False
        return os.waitstatus_to_exitcode(os.waitpid(self._warm_pid, 0)[1])

    def _pass_on(self, message: bytes, descriptors: list[int]) -> bool:
        assert self._warm_one is not None
        with contextlib.suppress(OSError):  # it is gone
            socket.send_fds(self._warm_one, [message], descriptors)
            return True
        return False


class Child:
    """A fork, until its client has heard how it ended."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid = pid
        self.reply = reply
        self.pidfd = os.pidfd_open(pid)

    def code(self) -> int:
        """How it ended, which it has; its number stays its own."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def bury(self) -> None:
        """End what is left of its group, and give its number back."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it is not yet a group
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.let_go()

    def let_go(self) -> None:
        """Close its descriptors."""
        os.close(self.pidfd)
        self.reply.close()


def warm_up(modules: list[str], requests: socket.socket, parent: int) -> Life:
    """Be the warm template: import, prove that this process can be forked, and serve.

    Args:
        modules: What to import.
        requests: The bare one's requests come from there; ``READY`` goes back, or why this one cannot be used.
        parent: Process id of the bare one.
    """
    from ddlf.worker.executor import die_with_parent

    die_with_parent(parent)
    gc.disable()
    os.environ.setdefault(*NO_THREAD)
    try:
        for name in modules:
            importlib.import_module(name)
        reason = why_unsafe()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
    requests.send((reason or READY).encode()[:MESSAGE_BYTES])
    if reason:
        os._exit(1)
    freeze()
    return Template(requests, modules).serve


def freeze() -> None:
    """Let forks never look at what is there now, neither their garbage collectors nor what looks for the user's modules: that would copy it.

    Nor does this process's own collector, which is off while it imports: it would take a fifth of the time, for a hundredth of the memory.
    """
    from ddlf.rpc.code import own_modules

    own_modules()
    gc.freeze()
    gc.enable()


def answer(descriptors: list[int], reason: str) -> None:
    """Answer a request to preload."""
    with socket.socket(fileno=descriptors[0]) as reply:
        tell(reply, {"reason": reason})


def tell(reply: socket.socket, facts: dict[str, Any]) -> None:
    """Send something to a client, if it is still there."""
    with contextlib.suppress(OSError):
        reply.send(json.dumps(facts).encode(), socket.MSG_DONTWAIT)


def close(descriptors: list[int]) -> None:
    """Close them all."""
    for fd in descriptors:
        os.close(fd)


def why_unsafe() -> str:
    """Why forks of this process would not be as good as new ones; empty if they are.

    Threads do not come along in a fork, so a pool that believes to have some would wait for them for ever. Libraries that know this,
    as OpenBLAS does, end theirs before each fork and start others when they are needed: so this forks once, and looks at what is left.
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
    """Where this process's descriptors lead."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def become_executor(request: dict[str, Any], descriptors: list[int], imported: list[str]) -> None:
    """Be what ``python -m ddlf.worker.executor`` would be, in a fork that has imported it already."""
    from ddlf.worker import executor

    reply, channel, activity, lifeline, stdout, stderr = descriptors
    os.setsid()
    for fd, place in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, place)
        os.close(fd)
    end_with(lifeline)
    with socket.socket(fileno=reply) as told:  # not before there is a group that can be killed
        tell(told, {"pid": os.getpid(), "modules": imported})
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if sys.path and sys.path[0] == os.getcwd():
        sys.path[0] = request["cwd"]  # as Python does for a module that it runs
    os.chdir(request["cwd"])
    # Each as unpredictable as that of a new process; all else takes its randomness from the system.
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    executor.run(channel, activity)


def end_with(lifeline: int) -> None:
    """Let the kernel kill this process as soon as nobody has the other end of a pipe open, whatever this process is doing.

    As ``PR_SET_PDEATHSIG``, but tied to the daemon, which is not the parent here: the signal for news on a descriptor is chosen to be
    SIGKILL, and the only news of this one is its end.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(lifeline, 0)  # that is POLLHUP alone
    if ended.poll(0):  # before it was asked for
        os._exit(0)


if __name__ == "__main__":
    main()
