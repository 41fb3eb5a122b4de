"""Images for a container engine that can pull none: made of this machine's own files, under the names that
docker-compose.yml and the Dockerfile pin.

What runs in them is the real thing (Apache Kafka with its own Docker wrapper, Jaeger, the collector, Debian's
Prometheus, this Python); only the base around it is not the published image.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.beside import SHARED, Missing, tool

LIBRARIES = "usr/lib/x86_64-linux-gnu"
JAVA = Path("/usr/lib/jvm/java-17-openjdk-amd64")
COMMANDS = (
    *("bash", "sh", "env", "cat", "ls", "mkdir", "rm", "cp", "mv", "ln", "chmod", "chown", "install", "id", "sleep"),
    *(
        "uname",
        "dirname",
        "basename",
        "readlink",
        "realpath",
        "head",
        "tail",
        "tr",
        "cut",
        "sort",
        "wc",
        "date",
        "test",
    ),
    *("true", "false", "expr", "grep", "sed", "mawk", "find", "xargs", "tar", "gzip", "wget", "touch", "mktemp", "tee"),
    *("hostname", "stat", "seq", "useradd", "groupadd", "getent"),
)
OF_GLIBC = (
    "c",
    "m",
    "rt",
    "dl",
    "pthread",
    "util",
    "resolv",
    "anl",
    "mvec",
    "nss_files",
    "nss_dns",
)  # what wheels may expect
PASSWD = "root:x:0:0::/root:/bin/sh\nappuser:x:1000:1000::/home/appuser:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
GROUP = "root:x:0:\nappuser:x:1000:\nnogroup:x:65534:\n"
# As the published image does it: the wrapper makes the configuration of KAFKA_* and formats the storage.
RUN_KAFKA = """#!/bin/sh
set -e
java -Xmx128m -cp '/opt/kafka/libs/*' kafka.docker.KafkaDockerWrapper setup --default-configs-dir /etc/kafka/docker \
    --mounted-configs-dir /mnt/shared/config --final-configs-dir /opt/kafka/config
exec java -Xmx256m -cp '/opt/kafka/libs/*' -Dlog4j2.configurationFile=/etc/kafka/docker/log4j2.properties \
    kafka.Kafka /opt/kafka/config/server.properties
"""
# For the wrapper to read; what is logged, RUN_KAFKA says.
LOGGING = """Configuration:
  Properties: {Property: []}
  Appenders: {Console: {name: STDOUT, PatternLayout: {pattern: "%m%n"}}}
  Loggers: {Root: {level: INFO, AppenderRef: [{ref: STDOUT}]}, Logger: []}
"""
API_VERSIONS = """#!/bin/sh
exec java -Xmx64m -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*' \
    org.apache.kafka.tools.BrokerApiVersionsCommand "$@"
"""


# What the Dockerfile installs, and what of Debian that takes; `_compiler` brings the machine's own copies.
COMPILER = ("gcc", "libc6-dev", "gcc-12", "cpp", "cpp-12", "libgcc-12-dev", "linux-libc-dev", "libcrypt-dev")
COMPILER += ("binutils", "binutils-common", "binutils-x86-64-linux-gnu")
APT_GET = """#!/bin/sh
for each in "$@"; do
    case "$each" in
        update | install | -y | --no-install-recommends | gcc | libc6-dev) ;;
        *) echo "apt-get: this stand-in has no $each" >&2; exit 100 ;;
    esac
done
"""


class Root:
    """A root file system, written to a tar."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115 closed by `close`
        self._there: set[str] = set()
        for name in ("bin", "sbin", "lib", "lib64"):
            self.link(name, f"usr/{name}")
        for name in ("tmp", "root", "home", "usr/bin", "usr/sbin", "usr/lib64", LIBRARIES, "etc/skel"):
            self.folder(name, mode=0o1777 if name == "tmp" else 0o755)

    def close(self) -> None:
        self._tar.close()

    def folder(self, name: str, *, owner: int = 0, mode: int = 0o755) -> None:
        self._add(name, tarfile.DIRTYPE, mode, owner)

    def link(self, name: str, target: str) -> None:
        self._add(name, tarfile.SYMTYPE, 0o777, link=target)

    def text(self, name: str, content: str, mode: int = 0o644) -> None:
        self._add(name, tarfile.REGTYPE, mode, data=io.BytesIO(content.encode()), size=len(content.encode()))

    def file(self, source: Path, name: str) -> None:
        with source.open("rb") as data:
            mode = 0o755 if os.access(source, os.X_OK) else 0o644
            self._add(name, tarfile.REGTYPE, mode, data=data, size=source.stat().st_size)

    def tree(self, source: Path, name: str, wanted: Callable[[str], bool] = lambda path: True) -> None:
        """A folder and what is in it, links followed. `wanted`: by the path below `source`."""
        for folder, _, files in os.walk(source, followlinks=True):
            for each in files:
                path = Path(folder, each)
                inside = str(path.relative_to(source))
                if wanted(inside) and path.is_file():
                    self.file(path, f"{name}/{inside}")

    def program(self, source: Path, name: str) -> None:
        """A program or a library, with all the libraries that it loads."""
        self.file(source, name)
        self.libraries_of(source)

    def libraries_of(self, source: Path) -> None:
        answer = subprocess.run(["ldd", str(source)], capture_output=True, text=True, check=False)
        for soname, path in re.findall(r"(\S+) => (/\S+)", answer.stdout):
            self.file(Path(path), f"{LIBRARIES}/{soname}")
        for path in re.findall(r"^\s*(/lib64/\S+)", answer.stdout, re.MULTILINE):
            self.file(Path(path), f"usr{path}")

    def _add(
        self,
        name: str,
        kind: bytes,
        mode: int,
        owner: int = 0,
        *,
        link: str = "",
        data: io.BufferedIOBase | None = None,
        size: int = 0,
    ) -> None:
        if name in self._there:
            return
        self._there.add(name)
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.linkname, info.size = kind, mode, link, size
        info.uid = info.gid = owner
        self._tar.addfile(info, data)


def _base(root: Root) -> None:
    """A shell and small tools."""
    for name in COMMANDS:
        found = shutil.which(name, path="/usr/sbin:/usr/bin")
        if found is None:
            raise Missing(f"no {name}: the stand-ins need Debian's usual tools")
        root.program(Path(found).resolve(), f"usr/bin/{name}")
    root.link("usr/bin/awk", "mawk")
    for name in OF_GLIBC:
        for each in Path("/", LIBRARIES).glob(f"lib{name}.so.[0-9]*"):
            root.file(each.resolve(), f"{LIBRARIES}/{each.name}")
    root.text("etc/passwd", PASSWD)
    root.text("etc/group", GROUP)
    root.text("etc/shadow", "root:*:::::::\n", 0o600)
    for name in ("etc/login.defs", "etc/nsswitch.conf"):
        root.file(Path("/", name), name)
    root.file(Path("/etc/ssl/certs/ca-certificates.crt"), "etc/ssl/certs/ca-certificates.crt")


def _python(root: Root) -> None:
    """This Python, as the official image has it, in /usr/local; and where this machine's pip finds packages."""
    _base(root)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(sys.base_prefix, "lib", version)
    unwanted = re.compile(r"(test|idlelib|tkinter|turtledemo|site-packages|config-[^/]*|.*/?__pycache__)/")
    root.tree(library, f"usr/local/lib/{version}", lambda path: not unwanted.match(path))
    for each in (library / "lib-dynload").glob("*.so"):
        root.libraries_of(each)
    root.program(Path(sys.base_prefix, "bin", version).resolve(), f"usr/local/bin/{version}")
    for name in ("python", "python3"):
        root.link(f"usr/local/bin/{name}", version)
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):  # the official image has them: torch loads them
        root.file(Path("/", LIBRARIES, name).resolve(), f"{LIBRARIES}/{name}")
    _compiler(root)
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if wheels and Path(wheels).is_dir():
        root.tree(Path(wheels), wheels.lstrip("/"))
    root.text("etc/pip.conf", f"[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = {wheels}\n")


def _compiler(root: Root) -> None:
    """What `apt-get install gcc libc6-dev` leaves, with an `apt-get` that has nothing more to do."""
    for package in COMPILER:
        listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
        if listed.returncode:
            raise Missing(f"no {package}: install Debian's packages gcc and libc6-dev")
        for path in map(Path, listed.stdout.splitlines()):
            if path.is_file() and not path.is_relative_to("/usr/share"):
                name = str(path).lstrip("/")
                root.program(path, name if name.startswith("usr/") else f"usr/{name}")
    root.link("usr/bin/cc", "gcc")
    root.text("usr/bin/apt-get", APT_GET, 0o755)
    root.folder("var/lib/apt/lists")


def _kafka(root: Root) -> None:
    if not JAVA.is_dir() or not (SHARED / "kafka/libs").is_dir():
        raise Missing(f"no Apache Kafka: {SHARED}/kafka and Debian's openjdk-17-jre-headless")
    _base(root)
    root.tree(JAVA / "lib", "opt/java/lib", lambda path: not path.startswith(("ct.sym", "src.zip")))
    root.tree(JAVA / "conf", "opt/java/conf")
    root.program(JAVA / "bin/java", "opt/java/bin/java")
    for each in (JAVA / "lib").rglob("*.so"):
        root.libraries_of(each)
    root.link("usr/bin/java", "/opt/java/bin/java")
    root.tree(SHARED / "kafka/libs", "opt/kafka/libs")
    root.text("opt/kafka/run", RUN_KAFKA, 0o755)
    root.text("opt/kafka/bin/kafka-broker-api-versions.sh", API_VERSIONS, 0o755)
    root.text("etc/kafka/docker/server.properties", "")
    for name in ("log4j2.yaml", "tools-log4j2.yaml"):
        root.text(f"etc/kafka/docker/{name}", LOGGING)
    root.file(SHARED / "kafka/log4j2.properties", "etc/kafka/docker/log4j2.properties")
    for name in ("opt/kafka/config", "var/lib/kafka/data", "mnt/shared/config", "home/appuser"):
        root.folder(name, owner=1000)


def _jaeger(root: Root) -> None:
    _base(root)
    root.program(tool("jaeger"), "cmd/jaeger/jaeger")


def _collector(root: Root) -> None:
    root.file(tool("otelcol"), "otelcol-contrib")


def _prometheus(root: Root) -> None:
    found = shutil.which("prometheus")
    if found is None:
        raise Missing("no prometheus: install Debian's package prometheus")
    _base(root)
    root.program(Path(found).resolve(), "usr/bin/prometheus")
    root.folder("prometheus", owner=65534)


# Name -> (what is in it, what `docker import` is told of it).
IMAGES: dict[str, tuple[Callable[[Root], None], tuple[str, ...]]] = {
    "python:3.11-slim-bookworm": (_python, ("ENV PATH /usr/local/bin:/usr/bin:/usr/sbin", 'CMD ["python3"]')),
    "apache/kafka:4.3.1": (
        _kafka,
        ("USER 1000", "WORKDIR /home/appuser", "ENV CLUSTER_ID 5L6g3nShT-eMCtK--X86sw", 'CMD ["/opt/kafka/run"]'),
    ),
    "jaegertracing/jaeger:2.20.0": (_jaeger, ("USER 1000", 'ENTRYPOINT ["/cmd/jaeger/jaeger"]')),
    "otel/opentelemetry-collector-contrib:0.159.0": (_collector, ()),
    "busybox:1.37.0-musl": (_base, ()),
    "prom/prometheus:v3.14.0": (_prometheus, ("USER 65534", 'ENTRYPOINT ["/usr/bin/prometheus"]')),
}


def import_all(docker: list[str], environment: dict[str, str]) -> Iterator[str]:
    """Imports every image with that docker command; yields their names. Raises Missing."""
    for name, (fill, changes) in IMAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "root.tar")
            root = Root(path)
            fill(root)
            root.close()
            words = [*docker, "import", *(word for change in changes for word in ("--change", change)), str(path), name]
            subprocess.run(words, env=environment, check=True, capture_output=True, timeout=300)
        yield name
