"""A stand-in for the commands of Slurm: ``sbatch``, ``squeue``, ``srun``, ``scancel``, ``sinfo`` and ``scontrol``.

A test writes this file under these names into a folder of PATH. Other files in the folder control it:

- ``calls`` receives each command line.
- ``job-N-I`` has the process id of element I of job N.
- ``said-N-I`` has the state that ``squeue`` prints for this element, instead of the true one.
- ``refusal`` is an error of ``sbatch`` and ``srun``; ``unreachable`` is an error of ``squeue``.
- With ``silent``, ``srun`` does not end with its program.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(sys.argv[0]).parent
NAME = Path(sys.argv[0]).name
WIDTHS = (40, 24, 12, 64, 24, 128)


def option(name):
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def sbatch():
    if "--test-only" in sys.argv and not (HERE / "refusal").exists():
        sys.exit(print("sbatch: Job 7 to start at noon on nodes n1", file=sys.stderr))
    if (HERE / "refusal").exists():
        sys.exit((HERE / "refusal").read_text())
    job = 7 + len(list(HERE.glob("submitted-*")))
    (HERE / f"submitted-{job}").touch()
    first, _, last = option("array").partition("-")
    for element in range(int(first), int(last or first) + 1):
        if (HERE / "full").exists():
            (HERE / f"said-{job}-{element}").write_text("PENDING 0 none N/A Resources")
            continue
        with open(option("output").replace("%a", str(element)), "a") as output:
            process = subprocess.Popen(
                ["sh", sys.argv[-1]],
                env={**os.environ, "SLURM_ARRAY_TASK_ID": str(element), "SLURM_CPUS_ON_NODE": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        (HERE / f"job-{job}-{element}").write_text(str(process.pid))
    print(job)


def squeue():
    if (HERE / "unreachable").exists():
        sys.exit((HERE / "unreachable").read_text())
    for path in {*HERE.glob("job-*"), *HERE.glob("said-*")}:
        _, job, element = path.name.split("-")
        row = "RUNNING 0 n1 N/A None"
        if path.name.startswith("job") and not Path(f"/proc/{path.read_text()}").exists():
            row = "COMPLETED 0 n1 N/A None"
        with contextlib.suppress(FileNotFoundError):
            row = (HERE / f"said-{job}-{element}").read_text() or row  # the file is empty while it is being written
        fields = (f"{job}_{element}", *row.split(" ", 4))
        print("".join(value.ljust(width) for value, width in zip(fields, WIDTHS, strict=True)))


def srun():
    words = sys.argv[1:]
    while words[0].startswith("-"):
        words.pop(0)
    if (HERE / "refusal").exists():
        sys.exit((HERE / "refusal").read_text())
    code = subprocess.call(words)
    while (HERE / "silent").exists():  # like after a kill of slurmstepd
        signal.pause()
    sys.exit(code)


def scancel():
    for path in HERE.glob("job-*"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def sinfo():
    if any(word.startswith("--format") for word in sys.argv):
        sys.exit(print("low up 4\nhigh up 4"))
    print("down*".ljust(24) + "Not responding".ljust(96))


with open(HERE / "calls", "a") as calls:
    print(NAME, *sys.argv[1:], file=calls)
if sys.argv[1:] == ["--version"]:
    sys.exit(print("slurm 1.0"))
{"sbatch": sbatch, "squeue": squeue, "srun": srun, "scancel": scancel, "sinfo": sinfo, "scontrol": int}[NAME]()
