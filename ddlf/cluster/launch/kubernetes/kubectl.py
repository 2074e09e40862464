"""Runs ``kubectl``, and reads from its answers why a pod waits and how it ended. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.errors import ConfigError, ConnectError
from ddlf.worker.process import child_environment

ANSWER_WITHIN = "--request-timeout=30s"
LINE_BYTES = 2**22
BY_SIGNAL = 128
"""A container that a signal has ended has this exit code plus the signal's number."""
SHOWN = 500
"""Letters of a container's last output in a message."""

Object = dict[str, Any]
"""An object of Kubernetes, such as a pod."""

DISRUPTIONS = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.PREEMPTED,
    "DeletionByTaintManager": Cause.NODE,
    "DeletionByPodGC": Cause.NODE,
}
"""Causes by the reason of a pod's condition DisruptionTarget."""
REASONS = {
    "OOMKilled": Cause.MEMORY,
    "Preempting": Cause.PREEMPTED,
    "Preempted": Cause.PREEMPTED,
    "DeadlineExceeded": Cause.TIME_LIMIT,
    "NodeLost": Cause.NODE,
    "NodeShutdown": Cause.NODE,
    "NodeAffinity": Cause.NODE,
    "Shutdown": Cause.NODE,
    "Terminated": Cause.NODE,
}
"""Causes by the reason of a pod's or container's status."""


class Kubectl:
    """The command ``kubectl`` for one namespace.

    Args:
        namespace: The namespace; None for that of kubectl's context.
    """

    def __init__(self, namespace: str | None = None) -> None:
        self._options = [] if namespace is None else [f"--namespace={namespace}"]

    async def __call__(self, *arguments: str, stdin: Object | None = None) -> str:
        """Run a command and return its output.

        Args:
            arguments: The command and its arguments.
            stdin: An object that it reads.

        Raises:
            ConfigError: There is no kubectl.
            ConnectError: It failed. The text has its own words.
        """
        process = await self._start([*arguments, ANSWER_WITHIN], stdin is not None)
        try:
            output, errors = await process.communicate(None if stdin is None else json.dumps(stdin).encode())
        finally:
            _kill(process)
        if process.returncode:
            raise ConnectError(f"kubectl {arguments[0]}: {_words(errors)}")
        return output.decode()

    async def read(self, *arguments: str, stdin: Object | None = None) -> Object:
        """Run a command that prints JSON, and return the object.

        Raises:
            ConfigError: There is no kubectl.
            ConnectError: It failed.
        """
        answer: Object = json.loads(await self(*arguments, "--output=json", stdin=stdin))
        return answer

    async def may(self, verb: str, kind: str) -> bool:
        """Return whether this user has the right for requests of a kind, such as ``create`` and ``jobs``.

        Raises:
            ConfigError: There is no kubectl.
            ConnectError: Kubernetes does not answer.
        """
        process = await self._start(["auth", "can-i", verb, kind, ANSWER_WITHIN], False)
        try:
            output, errors = await process.communicate()
        finally:
            _kill(process)
        answer = output.decode().strip()
        if not answer.startswith(("yes", "no")):
            raise ConnectError(f"kubectl auth: {_words(errors)}")
        return answer.startswith("yes")

    async def watch(self, kind: str, selector: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield each change of some objects as its type (ADDED, MODIFIED, DELETED) and the object. All that exist come
        first. Ends when the API server ends the request.

        Raises:
            ConfigError: There is no kubectl.
            ConnectError: It failed, or Kubernetes sent an error instead of a change.
        """
        options = ("--selector", selector, "--watch", "--output-watch-events", "--output=json")
        process = await self._start(["get", kind, *options], False)
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(process.stderr.read())
        try:
            text = b""
            async for line in process.stdout:
                text += line
                # An object is one line, or it begins and ends with a brace in the first column.
                if line[:1] in b"{}" and line.rstrip().endswith(b"}"):
                    event, text = json.loads(text), b""
                    if event["type"] == "ERROR":  # the object is a Status, such as 410 Expired
                        status = event["object"]
                        message = status.get("message") or "it sent an error without a word"
                        raise ConnectError(f"kubectl get: ({status.get('reason') or 'Unknown'}): {message}")
                    yield event["type"], event["object"]
            if await process.wait():
                raise ConnectError(f"kubectl get: {_words(await errors)}")
        finally:
            errors.cancel()
            _kill(process)
            await process.wait()

    async def _start(self, arguments: Sequence[str], has_stdin: bool) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                "kubectl",
                *self._options,
                *arguments,
                stdin=asyncio.subprocess.PIPE if has_stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(),
                limit=LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for this process, which then still needs kubectl
            )
        except FileNotFoundError:
            raise ConfigError(
                "launcher k8s needs the command kubectl, which is not on this machine",
                hint="install it, and check that 'kubectl get pods' works",
            ) from None


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _words(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ").removeprefix("Error from server ") if lines else "it failed without a word"


def _container(pod: Object) -> Object:
    """Return the state of a pod's only container."""
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    state: Object = statuses[0].get("state", {})
    return state


def waiting_reason(pod: Object) -> str:
    """Return why a pod does not run yet, in the words of Kubernetes; empty if it does not say."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    waiting = _container(pod).get("waiting", {})
    if "message" in waiting:
        return f"{waiting['reason']}: {waiting['message']}"
    reason = waiting.get("reason", "")
    return "" if reason in ("ContainerCreating", "PodInitializing") else reason


def end_of_worker(pod: Object, is_deleted: bool) -> Left | None:
    """Return how the worker of a pod ended; None if the pod still runs, or its worker has done its work.

    Args:
        pod: The pod.
        is_deleted: Whether Kubernetes has deleted it.
    """
    status = pod.get("status", {})
    phase = status.get("phase")
    if phase not in ("Failed", "Succeeded") and not is_deleted:
        return None
    ended = _container(pod).get("terminated", {})
    code = ended.get("exitCode")
    if code == 0 and phase == "Succeeded":
        return None
    disruption: Object = next(
        (condition for condition in status.get("conditions", ()) if condition["type"] == "DisruptionTarget"), {}
    )
    reason = status.get("reason") or disruption.get("reason") or ended.get("reason", "Error")
    message = status.get("message") or disruption.get("message") or ended.get("message", "")
    cause = DISRUPTIONS.get(disruption.get("reason", "")) or REASONS.get(reason)
    if cause is None and "TerminationByKubelet" in (reason, disruption.get("reason")):
        cause = Cause.MEMORY if "memory" in message else Cause.PREEMPTED
    by_somebody = reason == "Error" and (is_deleted or "deletionTimestamp" in pod["metadata"])
    if cause is None:
        cause = Cause.CANCELLED if by_somebody or code is None else Cause.CRASH
    words = " ".join(message.split())[-SHOWN:]
    if by_somebody:
        words = "it was deleted"
    elif code is not None and code > BY_SIGNAL and reason == "Error":  # the last output is about something earlier
        words = f"exit code {code}" + (f"; its last output: {words}" if words else "")
    elif not words:
        words = f"exit code {code}"
    reason = "" if reason == "Error" else f"{reason}: "
    return Left(cause, f"pod {pod['metadata']['name']}: {reason}{words}", code)
