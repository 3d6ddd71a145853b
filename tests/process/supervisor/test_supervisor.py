"""The supervisor with real processes: this file, run as a program, is a supervisor whose workers only answer signals.

Such a worker says on standard error that it is ready and which stop and reload signals it gets; SIGUSR1 makes it say
how many requests the scoreboard counts. Standard output has the log.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from proxy.process.shared import SharedState
from proxy.process.supervisor import RestartPolicy, run_supervisor
from proxy.process.supervisor.listening import create_listener, open_listeners
from proxy.process.supervisor.supervisor import _metrics_directory
from proxy.settings import Admin, Endpoint, Listen, LoadedSettings, Settings, SettingsError
from proxy.settings.model import Drain, Layerwise

# --- the program -----------------------------------------------------------------------------------------------------


def say(*words: object) -> None:
    os.write(2, (" ".join(map(str, words)) + "\n").encode())  # one write, so that lines of several workers stay whole


class Stop(Exception):
    """The worker is to leave."""


def wait_for_lost_supervisor(alive_fd: int | None, wakeup_fd: int) -> None:
    """Wait for the end of the supervisor, and run the handlers of signals.

    A signal that arrives just before `select` does not interrupt it. Python writes a byte to the other end of
    `wakeup_fd` for each signal. `alive_fd` None: there is no supervisor.
    """
    watched = [wakeup_fd] if alive_fd is None else [wakeup_fd, alive_fd]
    while alive_fd not in select.select(watched, [], [])[0]:
        os.read(wakeup_fd, 4096)


def signal_worker(shared: SharedState, worker: int, alive_fd: int | None) -> int:
    """Charge one request at the start, and release it only at the stop signal."""
    scoreboard = shared.scoreboard

    def stop(number: int, _frame: object) -> None:
        say("signal", worker, signal.Signals(number).name)
        raise Stop

    wakeup_fd, written_fd = os.pipe()
    os.set_blocking(written_fd, False)
    signal.set_wakeup_fd(written_fd)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, lambda *_: say("signal", worker, "SIGHUP"))
    signal.signal(
        signal.SIGUSR1,
        lambda *_: say("requests", worker, scoreboard.open_leases(0), shared.key_usage.count_in_flight(0)),
    )
    try:
        scoreboard.load_row(worker).add_load(0, requests=1)
        shared.key_usage.usage_row(worker).add_in_flight(0, 1)
        say("ready", worker, os.getpid(), shared.listeners.clients.getsockname()[1])
        wait_for_lost_supervisor(alive_fd, wakeup_fd)
        say("orphan", worker)
    except Stop:
        scoreboard.load_row(worker).add_load(0, requests=-1)
    return 0


def draining_worker(shared: SharedState, worker: int, alive_fd: int | None) -> int:
    """Needs two signals: at the first one it only stops accepting."""
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    say("ready", worker, os.getpid(), shared.listeners.clients.getsockname()[1])
    name = signal.Signals(signal.sigwait(numbers)).name
    shared.listeners.close()
    say("draining", worker, name)
    return 128 + signal.sigwait(numbers)


def failing_worker(*_: Any) -> int:
    raise RuntimeError("cannot work")


def metrics_worker(shared: SharedState, worker: int, alive_fd: int | None) -> int:
    import prometheus_client  # decides, as worker.run's imports do, how metrics are kept

    directory = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    gauge = prometheus_client.Gauge("up", "for the test", multiprocess_mode="livesum")
    gauge.set(1)
    say("metrics", worker, oct(directory.stat().st_mode & 0o777), directory)
    return signal_worker(shared, worker, alive_fd)


def main() -> int:
    run: Callable[..., int] = globals()[sys.argv[1]]
    settings = Settings(
        listen=Listen(port=int(sys.argv[3])),
        prefill=(Endpoint(host="127.0.0.1", port=1),),
        decode=(Endpoint(host="127.0.0.1", port=2),),
        workers=int(sys.argv[2]),
        worker_timeout_seconds=None,  # these workers have no event loop whose progress could be watched
        drain=Drain(not_ready_seconds=0),
    )
    return run_supervisor(
        lambda: LoadedSettings(settings, {}), run, RestartPolicy(first_delay_seconds=0.001, max_delay_seconds=0.01)
    )


if __name__ == "__main__":
    sys.exit(main())


# --- the tests -------------------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    worker: int
    pid: int
    port: int


class Program:
    """A running supervisor and what its workers say."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: set[int] = set()

    def hear(self) -> list[str]:
        """Return the words of the next line; [] after all processes have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().split()

    def hear_ready(self) -> Ready:
        words = self.hear()
        assert words[0] == "ready", words
        ready = Ready(*map(int, words[1:]))
        self.pids.add(ready.pid)
        return ready

    def hear_all_ready(self, workers: int) -> dict[int, Ready]:
        return {ready.worker: ready for ready in (self.hear_ready() for _ in range(workers))}

    def wait(self) -> int:
        return self.process.wait(timeout=100)


@contextmanager
def program(worker: str, workers: int, port: int = 0) -> Iterator[Program]:
    """Run a supervisor. A failed test kills its processes and reports their log; temporary files are always removed."""
    command = [sys.executable, "-P", __file__, worker, str(workers), str(port)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            command,
            env=environment | {"TMPDIR": directory},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        started = Program(process)
        try:
            yield started
        except BaseException as error:
            for pid in (process.pid, *started.pids) if process.poll() is None else ():
                kill_if_alive(pid)
            assert process.stdout is not None
            error.add_note(f"exit code {process.wait()}, log:\n{process.stdout.read()}")
            raise


def kill_if_alive(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def requests_counted_by(program: Program, ready: Ready) -> int:
    """Return the worker's number of requests, which scoreboard and client keys agree on."""
    os.kill(ready.pid, signal.SIGUSR1)
    words = program.hear()
    assert words[:2] == ["requests", str(ready.worker)]
    assert words[2] == words[3]
    return int(words[2])


def test_one_worker_runs_in_this_process() -> None:
    with program("signal_worker", 1) as gateway:
        assert gateway.hear_ready().pid == gateway.process.pid
        gateway.process.terminate()
        assert gateway.hear() == ["signal", "0", "SIGTERM"]
        assert gateway.wait() == 0


def test_several_workers_share_one_port_and_one_scoreboard() -> None:
    with program("signal_worker", 2) as gateway:
        workers = gateway.hear_all_ready(2)
        assert set(workers) == {0, 1}
        assert len({ready.port for ready in workers.values()}) == 1
        assert gateway.process.pid not in gateway.pids
        assert requests_counted_by(gateway, workers[0]) == 2
        gateway.process.terminate()
        assert gateway.wait() == 0


def test_killed_worker_is_replaced_and_its_load_is_erased() -> None:
    with program("signal_worker", 2) as gateway:
        workers = gateway.hear_all_ready(2)
        os.kill(workers[1].pid, signal.SIGKILL)
        replacement = gateway.hear_ready()
        assert replacement.worker == 1
        assert replacement.pid != workers[1].pid
        assert requests_counted_by(gateway, workers[0]) == 2  # 3 with the dead worker's
        gateway.process.terminate()
        assert gateway.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_reaches_each_worker_once_and_the_exit_code_is_0(number: signal.Signals) -> None:
    with program("signal_worker", 2) as gateway:
        gateway.hear_all_ready(2)
        gateway.process.send_signal(number)
        assert sorted(gateway.hear() for _ in range(2)) == [["signal", str(worker), number.name] for worker in range(2)]
        assert gateway.hear() == []
        assert gateway.wait() == 0


def test_hangup_reaches_one_living_worker_and_stops_no_worker() -> None:
    with program("signal_worker", 2) as gateway:
        workers = gateway.hear_all_ready(2)
        for _ in range(2):
            gateway.process.send_signal(signal.SIGHUP)
            assert gateway.hear() == ["signal", "0", "SIGHUP"]
        os.kill(workers[0].pid, signal.SIGKILL)
        assert gateway.hear_ready().worker == 0
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.hear() == ["signal", "1", "SIGHUP"]  # which has lived longer
        gateway.process.terminate()
        assert sorted(gateway.hear() for _ in range(2)) == [["signal", str(n), "SIGTERM"] for n in range(2)]
        assert gateway.hear() == []  # no other worker received the signal
        assert gateway.wait() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_hangup_ends_nothing_before_a_worker_listens_to_it_or_while_it_drains(workers: int) -> None:
    with program("draining_worker", workers) as gateway:
        gateway.hear_all_ready(workers)
        gateway.process.send_signal(signal.SIGHUP)
        gateway.process.terminate()
        assert [gateway.hear()[0] for _ in range(workers)] == ["draining"] * workers
        gateway.process.send_signal(signal.SIGHUP)
        gateway.process.terminate()
        assert gateway.wait() == 128 + signal.SIGTERM


def test_second_stop_signal_is_passed_on_and_the_workers_exit_code_is_ours() -> None:
    with program("draining_worker", 2) as gateway:
        gateway.hear_all_ready(2)
        gateway.process.terminate()
        assert sorted(gateway.hear() for _ in range(2)) == [["draining", str(worker), "SIGTERM"] for worker in range(2)]
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.wait() == 128 + signal.SIGINT


def test_port_is_closed_as_soon_as_all_workers_have_stopped_accepting() -> None:
    with program("draining_worker", 2) as gateway:
        port = gateway.hear_all_ready(2)[0].port
        gateway.process.terminate()
        assert sorted(gateway.hear()[0] for _ in range(2)) == ["draining", "draining"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        gateway.process.terminate()
        gateway.wait()


def test_worker_that_hangs_after_the_second_signal_is_killed() -> None:
    with program("draining_worker", 2) as gateway:
        workers = gateway.hear_all_ready(2)
        os.kill(workers[0].pid, signal.SIGSTOP)
        gateway.process.terminate()
        assert gateway.hear() == ["draining", "1", "SIGTERM"]
        gateway.process.terminate()
        assert gateway.wait() == max(128 + signal.SIGTERM, 128 + signal.SIGKILL)


def test_workers_of_a_killed_supervisor_leave_and_free_the_port() -> None:
    with program("signal_worker", 2) as gateway:
        workers = gateway.hear_all_ready(2)
        gateway.process.kill()
        assert sorted(gateway.hear() for _ in range(2)) == [["orphan", "0"], ["orphan", "1"]]
        assert gateway.hear() == []  # the last one has closed its end
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", workers[0].port))


def test_last_workers_of_a_killed_supervisor_remove_their_metrics() -> None:
    with program("metrics_worker", 2) as gateway:
        said = [gateway.hear() for _ in range(4)]
        directory = Path(next(words[3] for words in said if words[0] == "metrics"))
        gateway.process.kill()
        while gateway.hear():
            pass
        assert not directory.exists()


def test_workers_that_always_fail_end_the_program_with_their_traceback() -> None:
    with program("failing_worker", 2) as gateway:
        assert gateway.wait() == 1
        assert gateway.process.stdout is not None
        log = gateway.process.stdout.read()
        assert "RuntimeError: cannot work" in log
        assert "restart limit reached, shutting down" in log


def test_dead_workers_live_gauges_vanish_and_the_directory_is_private_and_removed() -> None:
    with program("metrics_worker", 2) as gateway:
        said = [gateway.hear() for _ in range(4)]
        directory = Path(next(words[3] for words in said if words[0] == "metrics"))
        assert {words[2] for words in said if words[0] == "metrics"} == {"0o700"}
        pids = {int(words[1]): int(words[2]) for words in said if words[0] == "ready"}
        gateway.pids |= set(pids.values())
        os.kill(pids[0], signal.SIGKILL)
        assert gateway.hear()[:2] == ["metrics", "0"]
        assert not (directory / f"gauge_livesum_{pids[0]}.db").exists()
        assert (directory / f"gauge_livesum_{pids[1]}.db").exists()
        gateway.pids.add(gateway.hear_ready().pid)
        gateway.process.terminate()
        assert gateway.wait() == 0
        assert not directory.exists()


def test_metrics_are_kept_in_shared_memory_when_no_disk_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with _metrics_directory() as directory:
        assert Path(directory).parent == Path("/dev/shm")


def test_importing_the_supervisor_does_not_decide_how_metrics_are_kept() -> None:
    program = "import sys, proxy.process.supervisor; sys.exit('prometheus_client' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wait_doubles_with_each_death_up_to_its_limit() -> None:
    policy = RestartPolicy()
    assert [policy.restart_delay_seconds(deaths) for deaths in range(1, 9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", socket.AF_INET)])
def test_gateway_listens_on_an_address_or_a_name(host: str, family: socket.AddressFamily) -> None:
    with create_listener(host, 0) as listener:
        assert listener.family == family
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def test_port_in_use_is_one_sentence() -> None:
    with create_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:{port}: address already in use$"):
            create_listener("127.0.0.1", port)


@pytest.mark.parametrize("workers", [1, 2])
def test_port_in_use_ends_the_program_with_that_sentence(workers: int) -> None:
    with create_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with program("signal_worker", workers, port) as gateway:
            assert gateway.wait() == 1
            assert gateway.process.stderr is not None
            said = gateway.process.stderr.read()
            assert said == f"pdproxy: error: cannot listen on 127.0.0.1:{port}: address already in use\n"


@pytest.mark.parametrize("option", ["port", "probe_port"])
def test_without_one_of_its_ports_it_keeps_none(option: str) -> None:
    with create_listener("127.0.0.1", 0) as taken, create_listener("127.0.0.1", 0) as free:
        client_port = free.getsockname()[1]
        free.close()
        admin = Admin.model_validate({option: taken.getsockname()[1]})
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:{taken.getsockname()[1]}: "):
            open_listeners(Settings(listen=Listen(port=client_port), admin=admin))
        create_listener("127.0.0.1", client_port).close()


def test_ports_for_operators_and_probes_are_opened_with_the_clients() -> None:
    with open_listeners(Settings(listen=Listen(port=0), admin=Admin(port=0, probe_port=0))) as listeners:
        assert listeners.admin is not None
        assert listeners.probes is not None
        ports = {sock.getsockname()[1] for sock in (listeners.clients, listeners.admin, listeners.probes)}
        assert len(ports) == 3
        for port in ports:
            socket.create_connection(("127.0.0.1", port)).close()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_engines_have_a_port_for_each_worker_to_call_back() -> None:
    settings = Settings(listen=Listen(port=0), connector="ascend_layerwise", workers=3)
    with open_listeners(settings) as listeners:
        ports = {listener.getsockname()[1] for listener in listeners.callbacks}
        assert len(ports) == 3
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    with open_listeners(settings.model_copy(update={"connector": "vllm_pull"})) as listeners:
        assert not listeners.callbacks


def test_without_one_of_the_ports_for_callbacks_it_keeps_none() -> None:
    with create_listener("127.0.0.1", 0) as taken, create_listener("127.0.0.1", 0) as free:
        port, client_port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        layerwise = Layerwise(port=port)
        listening = Listen(port=client_port)
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1:{port}: "):
            open_listeners(Settings(listen=listening, connector="ascend_layerwise", workers=2, layerwise=layerwise))
        create_listener("127.0.0.1", client_port).close()


def test_wildcard_address_is_rejected_as_callback_host() -> None:
    """Also where the connector is known only when the engines have said what they are."""
    found = Settings(listen=Listen(host="0.0.0.0", port=0)).model_copy(update={"connector": "ascend_layerwise"})
    with pytest.raises(SettingsError, match=r"^layerwise\.advertised_host must"):
        open_listeners(found)


def test_unknown_host_name_is_reported_in_one_sentence() -> None:
    with pytest.raises(OSError, match=r"^cannot listen on nowhere\.invalid:1999: "):
        create_listener("nowhere.invalid", 1999)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
@pytest.mark.parametrize(("host", "reached_at"), [("::1", "::1"), ("::", "127.0.0.1")])
def test_gateway_listens_on_ipv6_and_with_the_unspecified_address_on_ipv4(host: str, reached_at: str) -> None:
    with create_listener(host, 0) as listener:
        assert listener.family == socket.AF_INET6
        socket.create_connection((reached_at, listener.getsockname()[1])).close()
