"""``python -m tests.engines.kubernetes_build``: builds Kubernetes from Debian's source package, once, into a cache.

Debian 12 has kubectl as a binary package only, but its source package holds the whole tree with all it depends on. The
build takes about 4 minutes of two idle cores and 3 GB of memory; when it is interrupted, the next one goes on.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

#: Of Debian 12's source package.
VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
#: The image of all containers. It has no programs: ``/usr`` and what else a pod runs are volumes.
IMAGE = "localhost/host:1"

_ABOVE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paceline-k8s")
CACHE = _ABOVE / VERSION
IMAGE_FILE = CACHE / "image.tar"
_SOURCE = _ABOVE / "src"
_NEEDED = {
    "apt-get": "apt", "dpkg-source": "dpkg-dev", "go": "golang-go", "make": "make", "rsync": "rsync", "jq": "jq",
}  # fmt: skip
_DEBIAN = (
    "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main\n"
)

#: What a sandbox runs: it waits for the signal that ends it.
_PAUSE = """\
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	<-ended
}
"""


def is_built() -> bool:
    """Tell whether the cache has all programs and the image."""
    return all((CACHE / name).exists() for name in (*PROGRAMS, IMAGE_FILE.name))


def main() -> int:
    """Build what the cache lacks."""
    if is_built():
        return 0
    absent = sorted({package for tool, package in _NEEDED.items() if shutil.which(tool) is None})
    if absent:
        print(f"to build Kubernetes: apt-get install {' '.join(absent)}", file=sys.stderr)
        return 1
    _SOURCE.mkdir(parents=True, exist_ok=True)
    tree = _SOURCE / "tree"
    if not tree.exists():
        _fetch(tree)
    _make(tree)
    new = _SOURCE / "built"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for name in PROGRAMS:
        shutil.copy2(tree / "_output" / "local" / "go" / "bin" / name, new / name)
    (new / IMAGE_FILE.name).write_bytes(_image(_pause()))
    shutil.rmtree(CACHE, ignore_errors=True)
    new.rename(CACHE)
    shutil.rmtree(_SOURCE)
    return 0


def _fetch(tree: Path) -> None:
    """Fetch the source package and unpack it. apt has lists of its own here: the machine's stay as they are."""
    (_SOURCE / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (_SOURCE / "parts").mkdir(exist_ok=True)
    (_SOURCE / "sources.list").write_text(_DEBIAN)
    options = {"SourceList": _SOURCE / "sources.list", "SourceParts": _SOURCE / "parts"}
    words = [f"-oDir::Etc::{name}={path}" for name, path in options.items()]
    words += [f"-oDir::State::Lists={_SOURCE / 'lists'}", "-oDir::Cache::pkgcache=", "-oDir::Cache::srcpkgcache="]
    _run(["apt-get", "-q", *words, "update"])
    _run(["apt-get", "-q", *words, "source", "--download-only", "--only-source", "kubernetes"])
    [description] = _SOURCE.glob("kubernetes_*.dsc")
    new = _SOURCE / "unpacked"
    shutil.rmtree(new, ignore_errors=True)
    _run(["dpkg-source", "-x", str(description), str(new)])
    new.rename(tree)


def _make(tree: Path) -> None:
    """Build the programs. Other words in GOFLAGS would end in Kubernetes' list of tags."""
    targets = " ".join(f"cmd/{name}" for name in PROGRAMS)
    env = {"KUBE_GIT_VERSION": f"v{VERSION}", "CGO_ENABLED": "0", "GOFLAGS": "-mod=vendor"}
    _run(["make", f"WHAT={targets}"], tree, env)


def _pause() -> bytes:
    folder = _SOURCE / "pause"
    folder.mkdir(exist_ok=True)
    (folder / "pause.go").write_text(_PAUSE)
    _run(["go", "build", "-o", "pause", "pause.go"], folder, {"CGO_ENABLED": "0", "GOFLAGS": ""})
    return (folder / "pause").read_bytes()


def _image(pause: bytes) -> bytes:
    """Return the image as a file that ``ctr images import`` takes: one layer of empty folders, links and ``/pause``."""
    folders = ["usr", "etc", "tmp", "proc", "sys", "dev", "root", "run", "var", "var/tmp"]
    links = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    files = {"pause": pause, "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
    layer = _tar(files, folders, links)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/pause"], "Env": ["PATH=/usr/local/bin:/usr/bin:/usr/sbin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    texts = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    return _tar({**texts, "layer.tar": layer})


def _tar(files: dict[str, bytes], folders: Sequence[str] = (), links: dict[str, str] | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in folders:
            archive.addfile(_member(name, tarfile.DIRTYPE))
        for name, target in (links or {}).items():
            archive.addfile(_member(name, tarfile.SYMTYPE, linkname=target))
        for name, content in files.items():
            archive.addfile(_member(name, tarfile.REGTYPE, size=len(content)), io.BytesIO(content))
    return made.getvalue()


def _member(name: str, kind: bytes, *, size: int = 0, linkname: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname, member.mode = kind, size, linkname, 0o755
    return member


def _run(words: Sequence[str], folder: Path = _SOURCE, env: dict[str, str] | None = None) -> None:
    print("+", *words, flush=True)
    subprocess.run(words, cwd=folder, env={**os.environ, **(env or {})}, check=True)


if __name__ == "__main__":
    sys.exit(main())
