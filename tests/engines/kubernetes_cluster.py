"""A real Kubernetes on hosts with names, for tests: the control plane on the first host, a node on each other one.

The control plane, and each node with its containerd, kubelet and kube-proxy, is one namespace of processes and mounts:
it ends as a whole, with its containers, when one process ends. What a node's programs keep in ``/run``, ``/var/log``
and ``/var/lib``, and the settings of the kernel that a kubelet wants, are the node's own. Pods have addresses in
10.88.N.0/24, by node. There is no DNS.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.clusters.hosts import StepwiseStart
from tests.engines.kubernetes_build import CACHE, IMAGE_FILE, is_built
from tests.engines.named_hosts import NamedHosts

_TOOLS = {
    "etcd": "etcd-server", "containerd": "containerd", "ctr": "containerd", "runc": "runc", "conntrack": "conntrack",
    "iptables": "iptables", "openssl": "openssl", "kubectl": "kubernetes-client",
}  # fmt: skip
_CNI = Path("/usr/lib/cni")
_TOKEN = "of-the-tests"
_SERVICES = "10.96.0.0/16"
_PODS = "10.88.0.0/16"
_START_S = 300.0
_END_S = 20.0
#: What a kubelet wants, and would set for the whole machine.
_KERNEL = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}

_CONTROL = """\
etcd --data-dir etcd --unsafe-no-fsync >etcd.log 2>&1 &
"$BIN"/kube-apiserver --etcd-servers=http://127.0.0.1:2379 --cert-dir=pki --advertise-address="$ADDRESS" \
  --service-cluster-ip-range="$SERVICES" --authorization-mode=RBAC --allow-privileged --token-auth-file=tokens \
  --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key \
  --service-account-issuer=https://kubernetes.default.svc --kubelet-preferred-address-types=InternalIP >api.log 2>&1 &
until [ "$(kubectl get --raw /readyz 2>/dev/null)" = ok ]; do sleep 0.5; done
"$BIN"/kube-controller-manager --kubeconfig=kubeconfig --service-account-private-key-file=sa.key \
  --leader-elect=false >controllers.log 2>&1 &
"$BIN"/kube-scheduler --kubeconfig=kubeconfig --leader-elect=false >scheduler.log 2>&1 &
wait
"""

_NODE = """\
set -e
mkdir upper work
mount -t overlay overlay -o lowerdir=/var/lib,upperdir="$PWD"/upper,workdir="$PWD"/work /var/lib
for folder in /run /var/log; do mount -t tmpfs tmpfs $folder; done
for path in $(cd kernel; find . -type f); do mount --bind "kernel/$path" "/proc/sys/$path"; done
echo 1 >/proc/sys/net/ipv4/ip_forward
containerd --config containerd.toml >containerd.log 2>&1 &
until ctr --address containerd.sock version >/dev/null 2>&1; do sleep 0.2; done
ctr --address containerd.sock --namespace k8s.io images import "$IMAGE" >image.log 2>&1
"$BIN"/kubelet --config=kubelet.json --kubeconfig=../kubeconfig --hostname-override="$NAME" --node-ip="$ADDRESS" \
  --root-dir="$PWD"/kubelet --cert-dir="$PWD"/pki --volume-plugin-dir="$PWD"/plugins --container-runtime=remote \
  --container-runtime-endpoint=unix://"$PWD"/containerd.sock >kubelet.log 2>&1 &
"$BIN"/kube-proxy --kubeconfig=../kubeconfig --hostname-override="$NAME" --cluster-cidr="$PODS" \
  --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s \
  >proxy.log 2>&1 &
wait
"""


def why_no_kubernetes() -> str:
    """Return why Kubernetes cannot run here; an empty text when it can."""
    absent = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    absent += [] if (_CNI / "ptp").exists() else ["containernetworking-plugins"]
    if absent:
        return f"needs the packages {', '.join(absent)}"
    return "" if is_built() else "Kubernetes is not built: nox -s k8s builds it"


class KubernetesCluster(StepwiseStart):
    """A control plane, and a node on every host but the first.

    Args:
        hosts: where; they have addresses of the same /24.
        folder: for all files; not on a tmpfs or an overlay.
    """

    def __init__(self, hosts: NamedHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._control, *self._nodes = hosts.names
        self._cgroup = f"paceline-k8s-{os.getpid()}"
        self.environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
        self._running: list[subprocess.Popen[bytes]] = []

    def _open(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self.close)
        self._write_control()
        self._start(self._control, self._folder, _CONTROL)
        for index, name in enumerate(self._nodes):
            self._write_node(index, name)
            self._route(index, name)
            self._start(name, self._folder / name, _NODE)
        self._until(self._ready)

    def close(self) -> None:
        """End the control plane, the nodes and all pods."""
        for one in reversed(self._running):
            one.kill()
            one.wait()
        until = time.monotonic() + _END_S
        while (left := self._groups()) and time.monotonic() < until:
            for path in left:
                with contextlib.suppress(OSError):  # a process in it is still ending
                    path.rmdir()
            time.sleep(0.1)

    def kubectl(self, *words: str) -> str:
        """Run kubectl on the first host and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        return self._hosts.run(self._control, ["kubectl", *words], self.environment)

    def logs(self) -> str:
        """Return the last lines of all programs."""
        found = sorted(self._folder.glob("*.log")) + sorted(self._folder.glob("*/*.log"))
        tails = {path: path.read_text(errors="replace").splitlines()[-15:] for path in found}
        return "\n".join(f"{path}:\n" + "\n".join(lines) for path, lines in tails.items())

    def _write_control(self) -> None:
        address = self._hosts.address(self._control)
        (self._folder / "tokens").write_text(f'{_TOKEN},admin,1,"system:masters"\n')
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [
                {"name": "c", "cluster": {"server": f"https://{address}:6443", "insecure-skip-tls-verify": True}}
            ],
            "users": [{"name": "u", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        (self._folder / "kubeconfig").write_text(json.dumps(config))
        key, public = self._folder / "sa.key", self._folder / "sa.pub"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        words = ["openssl", "rsa", "-in", str(key), "-pubout", "-out", str(public)]
        subprocess.run(words, check=True, capture_output=True)

    def _write_node(self, index: int, name: str) -> None:
        folder = self._folder / name
        (folder / "cni").mkdir(parents=True)
        for path, value in _KERNEL.items():
            (folder / "kernel" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "kernel" / path).write_text(f"{value}\n")
        (folder / "containerd.toml").write_text(_containerd(folder))
        (folder / "cni" / "pods.conflist").write_text(json.dumps(_network(folder, _subnet(index))))
        (folder / "kubelet.json").write_text(json.dumps(_kubelet(self._cgroup)))

    def _route(self, index: int, name: str) -> None:
        """Have the other nodes reach the pods of one, and the node everything by the first host."""
        self._hosts.run(name, f"ip route add default via {self._hosts.address(self._control)}")
        for other in self._nodes:
            if other != name:
                self._hosts.run(other, f"ip route add {_subnet(index)} via {self._hosts.address(name)}")

    def _groups(self) -> list[Path]:
        """Return the cgroups of the pods that are left, inner ones first."""
        found = Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}")
        return [path for folder in found for path in (*sorted(folder.rglob("*/"), reverse=True), folder)]

    def _start(self, name: str, folder: Path, script: str) -> None:
        env = {
            **self.environment,
            "BIN": str(CACHE),
            "IMAGE": str(IMAGE_FILE),
            "NAME": name,
            "ADDRESS": self._hosts.address(name),
            "SERVICES": _SERVICES,
            "PODS": _PODS,
        }
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        with open(folder / "start.log", "wb") as log:
            self._running.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self._hosts.command(name, own)],
                    cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
                )
            )  # fmt: skip

    def _ready(self) -> bool:
        """Tell whether pods can start: all nodes are ready, and the account that pods have has its token."""
        with contextlib.suppress(AssertionError, json.JSONDecodeError):
            nodes = json.loads(self.kubectl("get", "nodes", "--output", "json"))["items"]
            states = [one for node in nodes for one in node["status"].get("conditions", ()) if one["type"] == "Ready"]
            account = json.loads(self.kubectl("get", "serviceaccount", "default", "--output", "json"))
            return [one["status"] for one in states] == ["True"] * len(self._nodes) and "secrets" in account
        return False

    def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        while not true():
            assert all(one.poll() is None for one in self._running), self.logs()
            assert time.monotonic() < until, self.logs()
            time.sleep(0.5)


def _subnet(index: int) -> str:
    return f"10.88.{index + 1}.0/24"


def _containerd(folder: Path) -> str:
    """Return containerd's configuration. Only root with CAP_SYS_RESOURCE may lower a container's OOM score."""
    plugin = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{folder / "root"}"
state = "{folder / "state"}"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{folder / "containerd.sock"}"
[{plugin}]
sandbox_image = "localhost/host:1"
restrict_oom_score_adj = true
[{plugin}.cni]
bin_dir = "{_CNI}"
conf_dir = "{folder / "cni"}"
"""


def _network(folder: Path, subnet: str) -> Mapping[str, Any]:
    """Return how pods are joined: each by a cable to its node, which routes. So it sees all traffic to Services."""
    ipam = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}


def _kubelet(cgroup: str) -> Mapping[str, Any]:
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "resolvConf": "",
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "2s",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
    }
