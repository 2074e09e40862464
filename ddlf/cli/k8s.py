"""``ddlf k8s``: print the manifests of a run on Kubernetes, and create the Secret with its token."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import Any

from ddlf.cli.options import checked_run_options, variables, workers_range
from ddlf.cli.parsing import Command, Parser, action
from ddlf.errors import ConfigError

MOST_APP_BYTES = 900_000
"""Largest file of an app in a manifest. Kubernetes takes 1 MiB."""
OF_PODS = ("image", "name", "namespace", "cores", "memory", "gpus", "time", "service_account", "claim", "start_timeout")
"""The options that are keys."""
OF_A_RUN = ("app", "options", "jobset", "in_image", "time", "claim", "start_timeout", "requeue")
"""The options that a run has, and a pool does not."""


def render(options: argparse.Namespace) -> int:
    """Run ``ddlf k8s render``: print manifests for ``kubectl apply -f -``, and the next command on standard error."""
    import yaml

    from ddlf.cluster.launch.keys import read_keys
    from ddlf.cluster.launch.kubernetes import manifests

    if options.pool:
        for key in OF_A_RUN:
            if getattr(options, key):
                shown = "an app" if key == "app" else f"--{key.replace('_', '-')}"
                raise ConfigError(f"{shown} has no effect with --pool", hint="leave it out: the pool only has workers")
    if options.requeue and options.claim is None:
        raise ConfigError(
            "--requeue needs a volume that keeps the checkpoints of a pod that is gone", hint="add --claim NAME"
        )
    if not options.pool and options.app is None:
        raise ConfigError("the app's file is missing", hint="ddlf k8s render app.py --workers 4 --image IMAGE")
    values: dict[str, Any] = {key: getattr(options, key) for key in OF_PODS if getattr(options, key) is not None}
    values["env"] = variables(options.env)
    values.setdefault("name", _name(options.app))
    keys = read_keys(manifests.RenderKeys, "k8s", values, options.workers)
    if options.pool:
        objects = manifests.pool(keys)
    else:
        requeue_options = ["--requeue", "--checkpoint", manifests.CHECKPOINTS] if options.requeue else []
        command = manifests.RunCommand(
            *_app(options), [*requeue_options, *checked_run_options(options.app, options.options)]
        )
        objects = (manifests.jobset if options.jobset else manifests.run)(keys, command)
    if keys.namespace is not None:
        for manifest in objects:
            manifest["metadata"]["namespace"] = keys.namespace
    yaml.add_representer(str, _text, yaml.SafeDumper)
    print(yaml.safe_dump_all(objects, sort_keys=False, width=1000), end="")
    kind = "statefulset" if options.pool else "jobset" if options.jobset else "job"
    where = "" if keys.namespace is None else f" --namespace {keys.namespace}"
    print(
        f"The pods wait for the Secret {keys.name!r} with the token. After kubectl apply, create it with:\n"
        f"  ddlf k8s secret {kind}/{keys.name}{where}",
        file=sys.stderr,
    )
    if options.pool:
        assert keys.workers is not None
        hosts = ",".join(
            f"{keys.name}-{index}.{keys.name}:{manifests.WORKER_PORT}" for index in range(keys.workers.most)
        )
        print(
            f"Then, in a pod of this namespace with the same Secret:\n  ddlf run app.py --hosts {hosts}",
            file=sys.stderr,
        )
    return 0


def secret(options: argparse.Namespace) -> int:
    """Run ``ddlf k8s secret``: create the Secret with a new token. The object that owns it is deleted with it."""
    return asyncio.run(_create_secret(options.owner, options.namespace))


async def _create_secret(owner: str, namespace: str | None) -> int:
    from ddlf.cluster.launch.kubernetes import manifests
    from ddlf.cluster.launch.kubernetes.kubectl import Kubectl
    from ddlf.rpc.tokens import new_token

    if not re.fullmatch(r"[a-z.-]+/[a-z0-9.-]+", owner):
        raise ConfigError(f"an owner is KIND/NAME, got {owner!r}", hint="as in: ddlf k8s secret job/app")
    kubectl = Kubectl(namespace)
    resource = await kubectl.read("get", owner)
    manifest = manifests.secret(resource["metadata"]["name"], new_token().encode(), resource)
    print((await kubectl("create", "--validate=false", "--filename=-", stdin=manifest)).strip())
    return 0


def _app(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the path of the app's file in the pods, and its text if the manifest must bring it."""
    from ddlf.cluster.launch.kubernetes.manifests import APP_FOLDER

    if options.in_image:
        if not options.app.is_absolute():
            raise ConfigError(
                f"with --in-image the app is an absolute path in the image, got {str(options.app)!r}",
                hint=f"such as {APP_FOLDER}/app.py",
            )
        return str(options.app), None
    try:
        text = options.app.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{options.app} cannot be read: {reason}", hint="if the image contains the app, add --in-image"
        ) from None
    if len(text.encode()) > MOST_APP_BYTES or not re.fullmatch(r"[\w.-]+", options.app.name, re.ASCII):
        raise ConfigError(
            f"{options.app} does not fit into a ConfigMap: at most {MOST_APP_BYTES} bytes, and a name of letters, "
            "digits, '.', '_' and '-'",
            hint="put it into the image, and add --in-image",
        )
    return f"{APP_FOLDER}/{options.app.name}", text


def _name(app: Path | None) -> str:
    from ddlf.cluster.launch.kubernetes.manifests import MOST_NAME

    stem = re.sub(r"[^a-z0-9]+", "-", app.stem.lower()).strip("-") if app is not None else "ddlf-pool"
    return (stem if stem[:1].isalpha() else f"ddlf-{stem}")[:MOST_NAME].strip("-")


def _text(dumper: Any, text: str) -> Any:
    """Write a text of several lines as it is, so that people can read it."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _render_options(parser: Parser) -> None:
    parser.add("app", nargs="?", type=Path, help="file of the app; the manifest contains it")
    parser.add("--workers", type=workers_range, required=True, metavar="N", help="number of pods, such as 4, or 2..8")
    parser.add("--image", required=True, help="image with ddlf, and the libraries of the app")
    parser.add("--options", default="", metavar="TEXT", help="options of ddlf run, such as '--master-epochs 5'")
    parser.add("--name", help="name of all objects (default: that of the app's file)")
    parser.add("--pool", action="store_true", help="workers that stay, for one run after the other (a StatefulSet)")
    parser.add("--jobset", action="store_true", help="a JobSet, for clusters before Kubernetes 1.33")
    parser.add("--in-image", action="store_true", help="the image contains the app; APP is its path there")
    _add_namespace(parser)
    parser.add("--cores", metavar="N", help="CPUs of each pod")
    parser.add("--memory", metavar="SIZE", help="memory of each pod, such as 4GiB")
    parser.add("--gpus", metavar="N", help="GPUs of each pod")
    parser.add("--env", action="append", metavar="NAME=VALUE", help="environment variable of each pod; repeatable")
    parser.add("--time", metavar="TIME", help="how long the Job may run, such as 2h")
    parser.add("--claim", metavar="NAME", help="claim of a volume where the run's folder stays")
    parser.add("--requeue", action="store_true", help="with --claim: continue the run if its master is started again")
    parser.add("--service-account", metavar="NAME", help="service account of the pods")
    parser.add("--start-timeout", metavar="TIME", help="how long pods wait for each other (default: 10m)")


def _secret_options(parser: Parser) -> None:
    parser.add("owner", metavar="KIND/NAME", help="the object whose pods need the token, such as job/app")
    _add_namespace(parser)


def _add_namespace(parser: Parser) -> None:
    parser.add("--namespace", metavar="NAME", help="namespace (default: that of kubectl's context)")


K8S = Command(
    description="Train in the pods of a Kubernetes cluster.",
    examples=(
        "ddlf k8s render app.py --workers 4 --image IMAGE | kubectl apply -f -",
        "ddlf k8s secret job/app",
    ),
    actions={
        "render": action(
            "print the manifests of a run",
            "Print manifests for 'kubectl apply -f -': a Job whose pods train the app. They contain no token.",
            _render_options,
            render,
            "ddlf k8s render app.py --workers 4 --image IMAGE | kubectl apply -f -",
            "ddlf k8s render app.py --workers 2..8 --image IMAGE --cores 4 --memory 8GiB",
            "ddlf k8s render app.py --workers 4 --image IMAGE --options '--master-epochs 20 --seed 1'",
            "ddlf k8s render --pool --workers 8 --image IMAGE | kubectl apply -f -",
        ),
        "secret": action(
            "create the Secret with the token",
            "Create the Secret that the pods of a Job, JobSet or StatefulSet wait for, with a new token. The token is "
            "shown nowhere, and Kubernetes deletes the Secret with its owner.",
            _secret_options,
            secret,
            "ddlf k8s secret job/app",
        ),
    },
)
