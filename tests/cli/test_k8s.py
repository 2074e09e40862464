"""Tests of ``ddlf k8s``: its output and its refusals."""

import os
import shlex
from pathlib import Path

import pytest
import yaml

from ddlf.cli import main
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cluster.launch.launcher import installed

PAGE = (Path(__file__).parents[2] / "docs/howto/deploy.md").read_text()

APP = 'import ddlf\n\n\nclass App(ddlf.IApp):\n    """It says $(HOME)."""\n'
IMAGE = ("--workers", "4", "--image", "image")


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app.py").write_text(APP)


def outputs_of(capsys, code, *words):
    with pytest.raises(SystemExit) as ended:
        main.main(["k8s", *words])
    assert ended.value.code == code
    return capsys.readouterr()


def test_manifest_contains_the_app_and_the_next_command_is_printed(capsys):
    output, errors = outputs_of(capsys, 0, "render", "my_app.py", *IMAGE, "--namespace", "lab", "--options", "--seed 1")
    app, service, job = yaml.safe_load_all(output)
    assert app["data"] == {"my_app.py": APP}
    assert "  my_app.py: |" in output, "people can read it"
    assert {manifest["metadata"]["namespace"] for manifest in (app, service, job)} == {"lab"}
    assert {manifest["metadata"]["name"] for manifest in (app, service, job)} == {"my-app"}
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][:5] == [
        "ddlf",
        "run",
        "/app/my_app.py",
        "--seed",
        "1",
    ]
    assert "ddlf k8s secret job/my-app --namespace lab" in errors


def test_pool_prints_how_to_use_it(capsys):
    output, errors = outputs_of(capsys, 0, "render", "--pool", *IMAGE, "--name", "lab")
    assert [manifest["kind"] for manifest in yaml.safe_load_all(output)] == ["Service", "StatefulSet"]
    assert "ddlf k8s secret statefulset/lab" in errors
    assert "ddlf run app.py --hosts lab-0.lab:9000,lab-1.lab:9000,lab-2.lab:9000,lab-3.lab:9000" in errors


def test_app_in_the_image_is_not_in_the_manifest(capsys):
    output, _ = outputs_of(capsys, 0, "render", "/opt/train.py", "--in-image", *IMAGE)
    assert [manifest["kind"] for manifest in yaml.safe_load_all(output)] == ["Service", "Job"]
    assert "/opt/train.py" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("render", *IMAGE), "the app's file is missing"),
        (("render", "other.py", *IMAGE), "other.py cannot be read: No such file or directory; if the image contains the app, add --in-image"),
        (("render", "app.py", "--in-image", *IMAGE), "with --in-image the app is an absolute path in the image"),
        (("render", "my_app.py", *IMAGE, "--memory", "4 apples"), "launcher k8s: memory must be above 0 and such as 2GiB or 800MB"),
        (("render", "my_app.py", *IMAGE, "--env", "A"), "--env is NAME=VALUE, got 'A'"),
        (("render", "my_app.py", *IMAGE, "--name", "My app"), "must be 1-40 small letters, digits and hyphens"),
        (("render", "--pool", *IMAGE, "--time", "2h"), "--time has no effect with --pool"),
        (("render", "my_app.py", "--pool", *IMAGE), "an app has no effect with --pool"),
        (("render", "my_app.py", "--workers", "0", "--image", "a"), "must be 1-1024 workers"),
        (("secret", "app"), "an owner is KIND/NAME, got 'app'; as in: ddlf k8s secret job/app"),
    ],
)  # fmt: skip
def test_mistake_is_refused_in_a_sentence(words, sentence, capsys):
    output, errors = outputs_of(capsys, 2, *words)
    assert sentence in errors
    assert output == ""


def test_app_that_is_too_large_for_a_manifest_is_refused(capsys, tmp_path):
    (tmp_path / "large.py").write_text("#" * 10**6)
    assert "large.py does not fit into a ConfigMap" in outputs_of(capsys, 2, "render", "large.py", *IMAGE).err


def test_secret_is_created_by_kubectl_and_not_shown(capsys, tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text(
        '#!/bin/sh\ncase "$1" in get) cat "$OWNER";; *) cat > "$SEEN"; echo secret/app created;; esac\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "owner").write_text(
        '{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "app", "uid": "7"}}'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setenv("OWNER", str(tmp_path / "owner"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    output, errors = outputs_of(capsys, 0, "secret", "job/app")
    assert (output, errors) == ("secret/app created\n", "")
    secret = yaml.safe_load((tmp_path / "seen").read_text())
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "7"
    assert len(secret["stringData"]["token"]) >= 40


def test_commands_of_the_page_are_understood(capsys, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    words = [
        part for part in PAGE.replace("\n", "`").split("`") if "ddlf k8s render" in part or "--launcher k8s" in part
    ]
    assert len(words) == 4
    for text in words:
        _, *command = shlex.split(text.partition("|")[0])
        if command[0] == "run":
            parser = Parser()
            add_options(parser)
            options = parser.parse_args(command[2:])
            assert installed(options.launcher, options.workers).keys.cores == 4
            continue
        missing = IMAGE if "--image" not in command else ()
        assert "kind: " in outputs_of(capsys, 0, *command[1:], *missing).out
    options = [part.split('"')[1] for part in PAGE.split("`") if part.startswith("--options")]
    assert len(options) == 1
    parser = Parser()
    add_options(parser)
    for text in options:
        parser.parse_args(shlex.split(text))


def test_run_that_continues_after_its_master_is_replaced_needs_a_volume(capsys):
    output, _ = outputs_of(
        capsys, 0, "render", "my_app.py", *IMAGE, "--claim", "runs", "--requeue", "--options", "--seed 1"
    )
    *_, job = yaml.safe_load_all(output)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[3:8] == ["--requeue", "--checkpoint", "/work/checkpoints", "--seed", "1"]
    ignored = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[1]["onExitCodes"]["values"] == [143]
    errors = outputs_of(capsys, 2, "render", "my_app.py", *IMAGE, "--requeue").err
    assert "--requeue needs a volume that keeps the checkpoints of a pod that is gone; add --claim NAME" in errors
