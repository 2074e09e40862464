"""A real sshd on loopback, and an ssh with several names for it."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from tests.fake_ssh import write_script
from tests.processes import is_listening

ROOT = Path(__file__).parents[2]
NOISY = """#!/bin/sh
echo "Welcome to this machine"
echo "quota: 3% used" >&2
exec ${LOGIN_SHELL:-sh} -c "$SSH_ORIGINAL_COMMAND"
"""


class Sshd:
    """An sshd, and an ssh whose configuration has the working hosts ``pc...`` and some hosts that fail. The host ``dead``
    does not answer.

    Args:
        folder: An empty folder.
        environment: More variables for the processes that sshd starts.
    """

    def __init__(self, folder, environment=None):
        self.folder = folder
        self.state = folder / "there" / "state"
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", ""]
        for name in ("host", "user", "other"):
            subprocess.run([*keygen, "-f", folder / name], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized_keys")
        write_script(folder / "noisy", NOISY)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.silent = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._unanswered = [socket.socket() for _ in range(2)]  # they fill its queue, so it does not answer
        for sock in self._unanswered:
            sock.setblocking(False)
            sock.connect_ex(self.silent.getsockname())
        more = "".join(f" {name}={value}" for name, value in (environment or {}).items())
        session_environment = f"PYTHONPATH={ROOT} XDG_STATE_HOME={self.state} XDG_DATA_HOME={folder}/there/data{more}"
        config = f"""
            Port {port}
            ListenAddress 127.0.0.1
            HostKey {folder}/host
            PidFile {folder}/sshd.pid
            AuthorizedKeysFile {folder}/authorized_keys
            StrictModes no
            UsePAM no
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            ForceCommand {folder}/noisy
            SetEnv {session_environment}
        """
        (folder / "sshd_config").write_text(config)
        (folder / "known_other").write_text(f"changed {(folder / 'other.pub').read_text()}")
        client_config = f"""
            Host newkey
                StrictHostKeyChecking yes
                UserKnownHostsFile /dev/null

            Host changed
                HostKeyAlias changed
                StrictHostKeyChecking yes
                UserKnownHostsFile {folder}/known_other

            Host refused
                Port 1
            Host dead
                Port {self.silent.getsockname()[1]}
            Host behind
                ProxyJump pc09
            Host nokey
                IdentityFile {folder}/other

            Host pc* behind newkey changed localhost 127.0.0.1
                IdentityFile {folder}/user
            Host *
                HostName 127.0.0.1
                Port {port}
                IdentitiesOnly yes
                IdentityAgent none
                UserKnownHostsFile {folder}/known
                StrictHostKeyChecking accept-new
        """
        (folder / "ssh_config").write_text(client_config)
        commands = folder / "commands"
        commands.mkdir()
        write_script(commands / "ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        Path("/run/sshd").mkdir(exist_ok=True)
        self.process = psutil.Popen(
            [shutil.which("sshd", path="/usr/sbin:/usr/bin"), "-D", "-f", folder / "sshd_config"]
        )
        self.path = f"{commands}:{os.environ['PATH']}"
        while not is_listening(port):
            assert self.process.is_running()

    def started(self, word):
        """Return the processes that this sshd has started with this word in their command line."""
        processes = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in process.cmdline():
                    processes.append(process)
        return processes

    def end(self):
        for sock in (self.silent, *self._unanswered):
            sock.close()
        processes = self.process.children(recursive=True)
        self.process.terminate()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
