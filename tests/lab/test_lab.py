"""The lab keeps its word: rates, delay, loss, cuts, NAT, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lab import CommandFailed, Host, Lab, LabError, LabProcess, janitor
from lab.terminal import Terminal

_ROOT = Path(janitor.__file__).parents[1]
# TCP carries 1448 bytes in a frame of 1514; the limit counts the frame.
_FRAME_OVER_PAYLOAD = 1514 / 1448

# Prints when how many bytes had come, once the first burst is over.
_RECEIVER = """
import json, socket, sys, time
settle, measure = float(sys.argv[1]), float(sys.argv[2])
server = socket.create_server(("0.0.0.0", 5000)); print("up", flush=True)
link, peer = server.accept()
room, count, start, seen = bytearray(1 << 20), 0, time.monotonic(), []
while got := link.recv_into(room):
    count, now = count + got, time.monotonic() - start
    if now > settle: seen.append((now, count))
    if now > settle + measure: break
print(json.dumps(seen))
"""
_SENDER = """
import socket, sys
link, data = socket.create_connection((sys.argv[1], 5000), 10), bytes(1 << 18)
try:
    while True: link.sendall(data)
except OSError: pass
"""
_ECHO = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); link.bind(("0.0.0.0", 5000)); print("up", flush=True)
while True:
    data, peer = link.recvfrom(2048); link.sendto(data, peer)
"""
_ROUND_TRIPS = """
import socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); link.connect((sys.argv[1], 5000)); link.settimeout(5)
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter(); link.send(b"x"); link.recv(10); times.append(time.perf_counter() - start)
print(sorted(times)[len(times) // 4])
"""
# With room for all of them: only the wire may lose any. (33 is SO_RCVBUFFORCE.)
_COUNT = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); link.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
link.bind(("0.0.0.0", 5000)); print("up", flush=True)
count = 0
while link.recv(2048) != b"end": count += 1
print("count", count)
"""
_POUR = """
import socket, sys, time
link, target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), (sys.argv[1], 5000)
for number in range(int(sys.argv[2])):
    link.sendto(b"data", target)
    if number % 50 == 0: time.sleep(0.005)
for _ in range(20): time.sleep(0.02); link.sendto(b"end", target)
"""
_REACHES = """
import socket, sys
try: print(socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).recv(100).decode())
except TimeoutError: print("silence")
"""
_GREETER = """
import socket
server = socket.create_server(("0.0.0.0", 5000)); print("up", flush=True)
while True:
    link, peer = server.accept(); link.sendall(peer[0].encode()); link.close()
"""


def _python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *map(str, words)]


def _until(condition: Callable[[], bool], patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def _serve(host: Host, code: str, *words: object) -> LabProcess:
    process = host.start(_python(code, *words))
    _until(lambda: "up" in process.output())
    return process


def _reached(src: Host, dst: Host | str, timeout: float = 30.0) -> str:
    """Return the caller that dst reports, or "silence"."""
    address = dst if isinstance(dst, str) else dst.address
    return src.run(_python(_REACHES, address, timeout), timeout=90).stdout.strip()


def _is_silent(src: Host, dst: Host | str) -> bool:
    return _reached(src, dst, 0.7) == "silence"


def _windows(src: Host, dst: Host, window: float, settle: float, measure: float = 1.5) -> list[float]:
    """Bits per second on the wire in every window of one transfer that began with an arrival."""
    receiver = _serve(dst, _RECEIVER, settle, measure)
    src.run(_python(_SENDER, dst.address), timeout=60)
    receiver.wait(60)
    seen = json.loads(receiver.output().splitlines()[-1])
    times, counts = np.array(seen).T
    begins = times[times < times[-1] - window]
    bytes_in = np.interp(begins + window, times, counts) - counts[: len(begins)]
    return list(bytes_in * 8 / window * _FRAME_OVER_PAYLOAD)


def _limit(src: Host, dst: Host, bits: float, settle: float = 0.5) -> float:
    """The rate that the wire allows: the best of several transfers, each the median of its windows.

    A machine whose cores are taken away for tenths of a second can only slow a transfer, for minutes even.
    """
    best = 0.0
    for _ in range(30):
        best = max(best, float(np.median(_windows(src, dst, max(0.05, 2.5e6 / bits), settle))))
        if best >= 0.96 * bits:
            break
    return best


def _round_trip(src: Host, dst: Host, trip: float, count: int = 40) -> float:
    """The lower quartile of a burst of round trips; the least of some bursts, as a busy core only adds."""
    shortest = float("inf")
    for _ in range(20):
        shortest = min(shortest, float(src.run(_python(_ROUND_TRIPS, dst.address, count)).stdout))
        if shortest <= 1.08 * trip:
            break
    return shortest


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    with Lab(hosts=2) as lab:
        yield lab


@pytest.fixture(scope="module")
def greeters() -> Iterator[Lab]:
    """Three hosts and two behind a NAT; each tells its caller where the call came from."""
    with Lab(hosts=3, nat=[2]) as lab:
        for host in [*lab.hosts, *lab.nats[0].hosts]:
            _serve(host, _GREETER)
        yield lab


@pytest.fixture
def healed(greeters: Lab) -> Iterator[Lab]:
    yield greeters
    greeters.heal_all()


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("100mbit", 1e8), ("20mbit", 2e7)])
def test_rate_limits_throughput_of_hosts(pair: Lab, rate: str, bits: float) -> None:
    first, second = pair.hosts
    for host in pair.hosts:
        pair.set_rate(host, rate)
    assert _limit(first, second, bits) == pytest.approx(bits, rel=0.05)


def test_rate_of_the_slower_side_rules_in_both_directions(pair: Lab) -> None:
    first, second = pair.hosts
    pair.set_rate(first, "1gbit")
    pair.set_rate(second, "20mbit", down="50mbit")
    assert _limit(first, second, 5e7) == pytest.approx(5e7, rel=0.05)
    assert _limit(second, first, 2e7) == pytest.approx(2e7, rel=0.05)


def test_host_without_rate_is_fast(pair: Lab) -> None:
    for host in pair.hosts:
        pair.set_rate(host, None)
    assert any(max(_windows(*pair.hosts, 0.05, settle=0.1)) > 1.5e9 for _ in range(20))


@pytest.mark.parametrize(("delay", "trip"), [("10ms", 0.02), ("50ms", 0.1)])
def test_round_trip_is_twice_the_delay(delay: str, trip: float) -> None:
    with Lab(hosts=2, delay=delay) as lab:
        first, second = lab.hosts
        _serve(second, _ECHO)
        assert _round_trip(first, second, trip) == pytest.approx(trip, rel=0.1)


def test_rate_holds_with_delay() -> None:
    with Lab(hosts=2, rate="100mbit", delay="10ms") as lab:
        assert _limit(lab.hosts[0], lab.hosts[1], 1e8, settle=1.5) == pytest.approx(1e8, rel=0.05)


def test_paths_of_hosts_differ_in_delay() -> None:
    with Lab(hosts=3, shaped=True) as lab:
        source, near, far = lab.hosts
        lab.set_path(source, far, delay="15ms", jitter="2ms")
        for host in (near, far):
            _serve(host, _ECHO)
        assert _round_trip(source, near, 0.0025, 50) < 0.003
        assert _round_trip(source, far, 0.03, 50) == pytest.approx(0.03, rel=0.1)


def test_sites_share_one_line() -> None:
    with Lab(hosts=3, shaped=True) as lab:
        first, second, far = lab.hosts
        lab.set_trunk([first, second], [far], "20mbit", delay="10ms")
        assert _limit(first, second, 1e8) > 5e7
        assert _limit(second, far, 2e7, settle=1.5) == pytest.approx(2e7, rel=0.05)
        assert lab.trunk_bytes() > 1e6
        _serve(far, _ECHO)
        assert _round_trip(first, far, 0.02, 20) == pytest.approx(0.02, rel=0.1)


def test_loss_of_datagrams() -> None:
    with Lab(hosts=2, loss="5%") as lab:
        sender, receiver = lab.hosts
        counter = _serve(receiver, _COUNT)
        sender.run(_python(_POUR, receiver.address, 6000))
        counter.wait(60)
        lost = 1 - int(counter.output().split()[-1]) / 6000
        assert lost == pytest.approx(0.05, rel=1 / 3)


def test_loss_of_tcp_packets_leaves_sound_ones() -> None:
    """TCP passes the forwarder in super-segments: it must lose single packets of them, and break none."""
    with Lab(hosts=2, rate=None, loss=0.02) as lab:
        sender, receiver = lab.hosts
        shares = []
        for _ in range(5):  # a forwarder that stands still makes the sender repeat what was not lost
            before = _tcp_counters(sender)
            _windows(sender, receiver, 0.5, settle=0.0, measure=2.0)
            sent = {name: count - before[name] for name, count in _tcp_counters(sender).items()}
            shares.append(sent["RetransSegs"] / sent["OutSegs"])
            if sent["OutSegs"] > 3000 and shares[-1] == pytest.approx(0.02, rel=1 / 3):
                break
        else:
            raise AssertionError(f"of 2 % were lost {shares}")
        assert _tcp_counters(receiver)["InCsumErrors"] == 0


def _tcp_counters(host: Host) -> dict[str, int]:
    lines = host.run(["grep", "^Tcp:", "/proc/net/snmp"]).stdout.splitlines()
    names, values = (line.split()[1:] for line in lines)
    return dict(zip(names, map(int, values), strict=True))


def test_cut_and_heal(healed: Lab) -> None:
    first, second, third = healed.hosts
    assert _reached(first, second) == first.address
    healed.cut(first, second)
    assert _is_silent(first, second)
    assert _is_silent(second, first)
    assert _reached(first, third) == first.address
    healed.heal(first, second)
    assert _reached(first, second) == first.address


def test_one_way_cut(healed: Lab) -> None:
    first, second, third = healed.hosts
    receiver = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); link.bind(("0.0.0.0", 6000)); link.settimeout(60)
print("up", flush=True)
print(link.recv(10).decode())
"""
    sender = "import socket, sys; socket.socket(2, 2).sendto(sys.argv[2].encode(), (sys.argv[1], 6000))"
    assert (
        _reached(second, first) == second.address
    )  # they know each other's MAC: no answer to that comes later
    healed.cut_one_way(first, second)
    for src, dst, result in ((first, second, "later"), (second, first, "first")):
        listener = _serve(dst, receiver)
        src.run(_python(sender, dst.address, "first"))
        third.run(_python(sender, dst.address, "later"))
        listener.wait(90)
        assert listener.output().split()[-1] == result
    # TCP needs both directions.
    assert _is_silent(second, first)
    healed.heal_all()
    assert _reached(second, first) == second.address


def test_nat_dials_out_and_cannot_be_dialled(greeters: Lab) -> None:
    (nat,) = greeters.nats
    public = greeters.hosts[0]
    inner, neighbour = nat.hosts
    assert _reached(inner, public) == nat.address == nat.router.address
    assert _reached(inner, neighbour) == inner.address
    assert _is_silent(public, nat.address)
    public.run(["ip", "route", "add", inner.address, "via", nat.address])
    assert _is_silent(public, inner)
    public.run(["ip", "route", "del", inner.address])


def test_cut_of_a_host_behind_nat_spares_its_neighbour(healed: Lab) -> None:
    public = healed.hosts[0]
    inner, neighbour = healed.nats[0].hosts
    for cut in (healed.cut, lambda a, b: healed.cut_one_way(b, a), healed.cut_one_way):
        cut(inner, public)
        assert _is_silent(inner, public)
        assert _reached(neighbour, public) == healed.nats[0].address
        healed.heal(inner, public)
        assert _reached(inner, public) == healed.nats[0].address


def test_nat_with_delay() -> None:
    with Lab(hosts=1, delay="10ms") as lab:
        nat = lab.add_nat(hosts=1)
        _serve(lab.hosts[0], _ECHO)
        trip = _round_trip(nat.hosts[0], lab.hosts[0], 0.02, 10)
        assert trip == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("shaped", [False, True])
def test_multicast_reaches_all_hosts(shaped: bool) -> None:
    receiver = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); link.bind(("", 5353)); link.settimeout(60)
link.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("224.0.0.251") + bytes(4))
print("up", flush=True)
print(link.recvfrom(100)[1][0])
"""
    sender = "import socket; socket.socket(2, 2).sendto(b'x', ('224.0.0.251', 5353))"
    with Lab(hosts=3, shaped=shaped) as lab:
        listeners = [_serve(host, receiver) for host in lab.hosts[1:]]
        lab.hosts[0].run(_python(sender))
        for listener in listeners:
            assert listener.wait(90) == 0
            assert listener.output().split()[-1] == lab.hosts[0].address


def test_hosts_use_cubic_and_have_loopback(pair: Lab) -> None:
    setting = pair.hosts[0].run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])
    assert setting.stdout == "cubic\n"
    _serve(pair.hosts[0], _GREETER)
    assert _reached(pair.hosts[0], "127.0.0.1") == "127.0.0.1"
    pair.hosts[0].kill_all()


def test_processes_of_a_host_enter_its_control_groups(pair: Lab, tmp_path: Path) -> None:
    host, other = pair.hosts
    host.groups = [tmp_path / "memory", tmp_path / "cpu"]
    try:
        for group in host.groups:
            group.mkdir()
        pid = host.run(_python("import os; print(os.getpid())")).stdout.strip()
        other.run(["true"])
        assert [(group / "cgroup.procs").read_text().strip() for group in host.groups] == [pid, pid]
        host.groups = [tmp_path / "missing"]
        assert host.run(["true"], check=False).returncode != 0, "it must not run outside of its groups"
    finally:
        host.groups = ()


def test_host_name_is_seen_by_processes_of_the_host_only(pair: Lab) -> None:
    host = pair.hosts[0]
    host.host_name = "mac"
    try:
        assert host.run(["hostname"]).stdout == "mac\n"
        process = host.start(["sh", "-c", "hostname; echo $$"])
        assert process.wait(10) == 0
        assert process.output().split() == ["mac", str(process.pid)]
    finally:
        host.host_name = None
    assert pair.hosts[1].run(["hostname"]).stdout == host.run(["hostname"]).stdout != "mac\n"


def test_processes_of_hosts_are_listed_and_killed(pair: Lab) -> None:
    host = pair.hosts[0]
    done = host.run(["sh", "-c", "echo out; echo $WORD >&2; exit 3"], env={"WORD": "bad"}, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "bad\n")
    with pytest.raises(CommandFailed, match="sorry"):
        host.run(["sh", "-c", "echo sorry >&2; exit 1"])
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sleep", "60"], timeout=0.1)
    assert host.run(["cat"], input="given").stdout == "given"
    assert host.run(["pwd"], cwd="/usr").stdout == "/usr\n"

    trapper = host.start(
        ["sh", "-c", "trap 'echo caught; exit 7' USR1; echo up; while :; do sleep 0.01; done"]
    )
    _until(lambda: "up" in trapper.output())
    assert trapper.returncode is None
    trapper.signal(signal.SIGUSR1)
    assert trapper.wait(60) == 7
    assert trapper.output() == "up\ncaught\n"
    trapper.signal(signal.SIGTERM)

    parent = host.start(["sh", "-c", "sleep 60 & echo up; wait"])
    _until(lambda: "up" in parent.output() and len(host.pids()) == 2)
    parent.kill()
    assert parent.returncode == -signal.SIGKILL
    _until(lambda: host.pids() == [])


def test_starting_is_cheap(pair: Lab) -> None:
    def seconds(work: Callable[[], object]) -> float:
        start = time.monotonic()
        work()
        return time.monotonic() - start

    # Outside of any lab, too: a busy machine starts everything slowly.
    pairs = [
        (seconds(lambda: pair.hosts[0].run(["true"])), seconds(lambda: subprocess.run(["true"])))
        for _ in range(40)
    ]
    here, outside = (sorted(column)[10] for column in zip(*pairs, strict=True))
    assert here < max(0.05, 5 * outside)


def test_parallel_labs_do_not_meet() -> None:
    def use(number: int) -> str:
        with Lab(hosts=2) as lab:
            first, second = lab.hosts
            for host in lab.hosts:
                _serve(host, _GREETER)
            if is_cut := number % 2 == 1:
                lab.cut(first, second)
            assert _is_silent(first, second) if is_cut else _reached(first, second) == first.address
            return lab.id

    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(use, range(4)))
    assert len(set(ids)) == 4
    assert [lab for lab in ids if janitor.namespaces_of(lab)] == []


_OWNER = """
import json, os, time
from lab import Lab
lab = Lab(hosts=2, nat=[1], delay="1ms").open()
nested = lab.hosts[0].start(["setsid", "-f", "sh", "-c", "sleep 600 & wait"])
nested.wait()
lab.hosts[1].start(["sleep", "600"])
while len(lab.hosts[0].pids()) != 2 or len(lab.hosts[1].pids()) != 1: time.sleep(0.01)
pids = [pid for host in lab.hosts for pid in host.pids()]
if os.fork() == 0: time.sleep(600)
print(json.dumps({"lab": lab.id, "pids": pids, "directory": str(lab.hosts[0]._directory)}), flush=True)
"""


@pytest.mark.parametrize("ending", ["kill", "exit", "exception"])
def test_nothing_is_left_behind(ending: str) -> None:
    last = {"kill": "time.sleep(600)", "exit": "os._exit(0)", "exception": "raise SystemExit(1)"}[ending]
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER + last], stdout=subprocess.PIPE, cwd=_ROOT, start_new_session=True
    )
    try:
        assert owner.stdout is not None
        made = json.loads(owner.stdout.readline())
        if ending == "kill":
            assert len(janitor.namespaces_of(made["lab"])) == 5
            assert not janitor.is_orphan(made["lab"])
            owner.kill()
        owner.wait(60)
        _until(lambda: not (janitor.RECORDS / made["lab"]).exists())
        assert janitor.namespaces_of(made["lab"]) == []
        assert made["lab"] not in janitor.known_labs()
        assert [pid for pid in made["pids"] if janitor.started_at(pid) is not None] == []
        assert not Path(made["directory"]).exists()
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate()


def test_clean_removes_labs_without_owner_and_janitor_only() -> None:
    code = """
import os, signal
from lab import Lab
lab = Lab(hosts=1).open()
print(lab.id, flush=True)
os.kill(lab._state.janitor.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Lab(hosts=1) as own_lab:
        for _ in range(5):  # a lab that is opened beside these tests cleans up, too, and may be faster
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT)
            lost = done.stdout.strip()
            cleaned = subprocess.run(
                [sys.executable, "-m", "lab", "clean"], capture_output=True, text=True, cwd=_ROOT, check=True
            )
            if f"{lost}  removed" in cleaned.stdout:
                break
        else:
            raise AssertionError(f"{lost} is not among {cleaned.stdout!r}")
        assert janitor.namespaces_of(lost) == []
        assert own_lab.hosts[0].run(["echo", "here"]).stdout == "here\n"


def test_terminal_shows_what_is_typed_and_exit_codes(pair: Lab, tmp_path: Path) -> None:
    with Terminal(pair.hosts[0], {"PATH": "/usr/bin:/bin"}, tmp_path) as terminal:
        assert terminal.run("stty size; tty -s; (exit 3)").code == 3
        assert terminal.commands[0].output.splitlines()[1:] == ["40 80"]
        asking = terminal.type("read -p 'Name? ' name; echo you are $name; sleep 30")
        terminal.until(asking, "Name")
        terminal.press("oak\n")
        terminal.until(asking, "you are oak")
        terminal.press("\x03")
        assert terminal.wait(asking, 10) == 130
        with pytest.raises(LabError, match="ended without"):
            terminal.until(terminal.type("true"), "never")


def test_terminal_that_is_held_open_reads_nothing_of_the_next_one(pair: Lab, tmp_path: Path) -> None:
    with Terminal(pair.hosts[0], {"PATH": "/usr/bin:/bin"}, tmp_path) as held:
        held.run("(trap '' HUP; sleep 6; while echo noise; do sleep 0.2; done) &")
    with Terminal(pair.hosts[0], {"PATH": "/usr/bin:/bin"}, tmp_path) as terminal:
        for number in range(40):
            time.sleep(0.2)
            assert f"line {number}" in terminal.run(f"echo line $(({number}))", 10).output.splitlines()
