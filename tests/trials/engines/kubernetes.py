"""The rig for Kubernetes: the real ``kubectl``, and a stand-in for the API server that runs pods as processes."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.engines.kubernetes_cluster import BACK_OFF_S, Cluster
from tests.trials.engines.rig import MARK, ROOT, End, Rig, Run, Victim, kill
from tests.trials.engines.stuck import TIMEOUT, Stuck


class KubernetesRig(Rig):
    """A rig with a cluster that restarts a pod ``BACK_OFF_S`` after its end."""

    name = "k8s"
    gone_says = "the run continues, and asks again"
    gone_ends = False
    gone_s = 0.0

    def open(self) -> None:
        # The pods inherit these variables.
        os.environ |= {MARK: self.mark, "PYTHONPATH": str(ROOT)}
        number = len(list(self.folder.iterdir()))
        folder = self.folder / str(number)
        folder.mkdir()
        self._cluster = Cluster(folder)
        self._cluster.inherited.add(MARK)
        self._is_gone = False

    def close(self) -> None:
        self._cluster.close()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "KUBECONFIG": str(self._cluster.kubeconfig)}

    def launcher(self, run: Run) -> list[str]:
        return ["--workers", str(self.places), "--launcher", f"k8s:image=image,env.DDLF_GRACE={self.notice_s:g}"]

    def victims(self) -> dict[str, Victim]:
        def end(*how: str, number: int = signal.SIGKILL):
            return lambda run, place: self._end(place, *how, number=number)

        return {
            "executor": Victim(lambda run, place: kill(run.executor(place)), "SIGKILL"),
            "daemon": Victim(lambda run, place: kill(run.daemon(place)), "exit code 137", BACK_OFF_S),
            "memory": Victim(end("OOMKilled"), "OOMKilled: exit code 137", BACK_OFF_S),
            "node": Victim(end("", "node is gone", "DeletionByPodGC"), "DeletionByPodGC: node is gone", BACK_OFF_S),
        }

    def _end(self, place: int, *how: str, number: int) -> None:
        self._cluster.wait(lambda cluster: cluster.pod(place), 120.0)
        self._cluster.end(place, *how, number=number)

    def _kubectl(self, *words: str) -> None:
        subprocess.run(["kubectl", *words], env=self.environment(), check=False, capture_output=True, timeout=60)

    def notice(self, run: Run, place: int) -> None:
        """Delete the pod of a place, with a grace period."""
        pod = self._cluster.wait(lambda cluster: cluster.pod(place), 120.0)
        self._kubectl("delete", f"pod/{pod}", f"--grace-period={self.notice_s:g}", "--wait=false")

    def stuck(self) -> dict[str, Stuck]:
        def k8s(*keys: str, image: str = "image") -> list[str]:
            return ["--workers", "2", "--launcher", ",".join((f"k8s:image={image}", TIMEOUT, *keys))]

        return {
            "no resources": Stuck(k8s("cores=65"), r"Unschedulable: 0/1 nodes are available: 1 Insufficient cpu\."),
            "no service account": Stuck(k8s("service_account=missing"), "FailedCreate: Error creating: pods "),
            "ImagePullBackOff": Stuck(k8s(image="missing:1"), 'ImagePullBackOff: Back-off pulling image "missing:1"'),
        }

    def left(self, run: Run) -> list[str]:
        named = self._cluster.named
        kinds = ("jobs", "pods", "secrets")
        return super().left(run) + [f"{kind} {name}" for kind in kinds for name in named(kind) if not self._is_gone]

    def ends(self) -> dict[str, End]:
        return {**super().ends(), "kubectl delete job": End(self._delete, ends_master=False)}

    def _delete(self, run: Run) -> None:
        for name in self._cluster.named("jobs"):
            self._kubectl("delete", f"job/{name}", "--wait=false")

    def lose_engine(self, run: Run) -> None:
        """End the API server. The pods continue."""
        self._is_gone = True
        self._cluster.stop_answering()

    def clean(self, run: Run) -> None:
        super().clean(run)
        if self._is_gone:
            self.close()
            self.open()
