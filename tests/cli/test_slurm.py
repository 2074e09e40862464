"""Tests of ``ddlf slurm render``, which prints the script of a job."""

import shlex

import pytest

from ddlf.cli.main import main


@pytest.fixture(autouse=True)
def apps(tmp_path, monkeypatch):
    """Write two files of apps into the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("app.py", "my app.py"):
        (tmp_path / name).touch()


def rendered(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "render", *words])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_script_requests_the_resources_of_each_task(capsys):
    code, script, _ = rendered(
        capsys,
        *("my app.py", "--workers", "2..8", "--cores", "2", "--memory", "4GiB", "--gpus", "1", "--time", "90m"),
        *("--partition", "gpu", "--env", "A=b c", "--start-timeout", "20m", "--options", "--seed 1"),
    )
    assert code == 0
    first, *lines, command = script.splitlines()
    assert first == "#!/bin/sh"
    assert lines == [
        "#SBATCH --job-name=my app",
        "#SBATCH --ntasks=8",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem-per-cpu=2048M",
        "#SBATCH --gpus-per-task=1",
        "#SBATCH --time=01:30:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "export A='b c'",
    ]
    assert shlex.split(command) == [
        *("srun", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=2", "ddlf", "run", "my app.py"),
        *("--launcher", "slurm:workers=2..8,start_timeout=1200", "--seed", "1"),
    ]


def test_script_without_options_is_short(capsys):
    _, script, _ = rendered(capsys, "app.py", "--workers", "4", "--python", "/opt/python")
    assert script.splitlines()[1:3] == ["#SBATCH --job-name=app", "#SBATCH --ntasks=4"]
    assert script.splitlines()[-1].endswith("/opt/python -m ddlf run app.py --launcher slurm")


def test_wrong_values_are_refused(capsys):
    code, _, errors = rendered(capsys, "app.py", "--workers", "4", "--memory", "much")
    assert code == 2
    assert "launcher slurm: memory must be above 0 and such as 2GiB or 800MB, got 'much'" in errors
    code, _, errors = rendered(capsys, "app.py", "--workers", "4", "--env", "x")
    assert code == 2
    assert "--env is NAME=VALUE, got 'x'" in errors
    code, _, errors = rendered(capsys, "app.py", "--workers", "4", "--env", "A-B=x")
    assert code == 2
    assert "env must have names of environment variables, got 'A-B'" in errors
    code, script, errors = rendered(capsys, "app.py", "--workers", "4", "--env", "DDLF_TOKEN=x")
    assert (code, script) == (2, "")
    assert "env must not contain DDLF_TOKEN" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "there is no file nope.py; name the app's file, as the job finds it"),
        (["app.py", "--options", "--master-epoch 3"], "unknown option '--master-epoch', did you mean --master-epochs?"),
        (["app.py", "--options", "--name 'a"], "--options cannot be read: No closing quotation"),
    ],
)
def test_app_and_options_are_checked(capsys, words, message):
    code, script, errors = rendered(capsys, *words, "--workers", "4")
    assert (code, script) == (2, "")
    assert message in errors


def test_requeued_job_gets_a_notice_before_its_time_limit(capsys):
    words = ("app.py", "--workers", "4", "--time", "1h", "--requeue", "--checkpoint", "kept")
    _, script, _ = rendered(capsys, *words, "--notice", "90", "--options", "--seed 1")
    lines = script.splitlines()
    assert lines[-4:-1] == ["#SBATCH --signal=TERM@90", "#SBATCH --requeue", "export DDLF_GRACE=90"]
    assert lines[-1].endswith("app.py --launcher slurm --requeue --checkpoint kept --seed 1")
    for wrong, message in (
        (words[:-2], "--requeue needs a folder of checkpoints, because the next start continues from them"),
        ((*words[:-3], "--notice", "5"), "--notice has no effect without --requeue"),
    ):
        code, script, errors = rendered(capsys, *wrong)
        assert (code, script) == (2, "")
        assert message in errors
