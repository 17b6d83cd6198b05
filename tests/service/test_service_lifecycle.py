"""Start, stop and death of the service's processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.config import StartError


def wait_until(condition, deadline_s=5.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run_serve(address, *options, env=None):
    command = [sys.executable, "-m", "kvstore", "serve", "--address", str(address), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, env=env)


def test_a_ready_service_has_its_sockets_in_a_folder_for_its_group(launch):
    address = launch.folder / "new" / "kv.sock"
    launch(address=address)
    assert address.parent.stat().st_mode & 0o777 == 0o750
    names = {path.name: path.stat().st_mode & 0o777 for path in address.parent.iterdir()}
    assert names == {"kv.sock": 0o660, "kv.sock.fd": 0o660, "kv.sock.admin": 0o600, "kv.sock.lock": 0o640}


def test_b124_a_second_service_on_the_same_socket_is_refused_and_harms_nobody(launch):
    first = launch()
    second = run_serve(launch.address)
    assert second.returncode == 1
    assert f"pid {first.pid}" in second.stderr
    assert "--address" in second.stderr
    assert "Traceback" not in second.stderr
    assert first.poll() is None
    assert launch.address.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"{launch.address}.fd")


def test_b124_stale_sockets_of_a_killed_service_are_removed(launch):
    first = launch()
    first.kill()
    assert launch.address.with_name("kv.sock.fd").exists()
    second = launch()
    assert second.poll() is None
    assert "stale socket" in launch.log


def test_a_file_that_is_no_socket_is_left_alone(launch):
    launch.address.write_text("mine")
    result = run_serve(launch.address)
    assert result.returncode == 1
    assert "is no socket" in result.stderr
    assert launch.address.read_text() == "mine"


def test_a_socket_that_another_program_serves_is_left_alone(launch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(launch.address))
        other.listen()
        result = run_serve(launch.address)
        assert result.returncode == 1
        assert "another program listens" in result.stderr
        assert launch.address.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b200_a_stop_exits_with_0_and_leaves_nothing(launch, number):
    service = launch()
    (server,) = children_of(service.pid)
    os.kill(service.pid, number)
    assert service.wait(5) == 0
    assert not alive(server)
    assert [path.name for path in launch.folder.iterdir()] == ["log"]


def test_ctrl_c_reaches_the_whole_group_and_still_exits_with_0(launch):
    with launch.log_path.open("ab") as log:
        command = [sys.executable, "-m", "kvstore", "serve", "--address", str(launch.address)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    assert process.stdout.readline() == f"kvstore: serving on unix:{launch.address}\n".encode()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(5) == 0
    process.stdout.close()
    assert "Traceback" not in launch.log


def test_a_dead_server_ends_the_service_with_a_message(launch):
    service = launch()
    (server,) = children_of(service.pid)
    os.kill(server, signal.SIGKILL)
    assert service.wait(2) == 1
    assert f"error: the server process {server} was killed by signal 9 (SIGKILL)" in launch.log
    assert not launch.address.exists()


def test_the_server_dies_with_its_supervisor(launch):
    service = launch()
    (server,) = children_of(service.pid)
    service.kill()
    wait_until(lambda: not alive(server))


def test_a_service_that_watches_its_parent_ends_with_it(launch):
    code = (
        "import sys, os; from pathlib import Path; from kvstore.launch import ServiceProcess\n"
        "print(ServiceProcess.start(Path(sys.argv[1])).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(launch.address)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    wait_until(lambda: not alive(int(result.stdout)))
    wait_until(lambda: not launch.address.exists())


def test_a_starter_that_died_at_once_leaves_no_service_behind(launch):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvstore", "serve", "--address", str(launch.address)]
    command += ["--ready-fd", str(write), "--exit-with-parent"]
    with launch.log_path.open("ab") as log:
        process = subprocess.Popen(command, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=log)
    os.close(write)
    assert process.wait(20) == 0
    assert "Traceback" not in launch.log


def test_the_launcher_says_when_the_service_does_not_start(launch):
    with pytest.raises(StartError, match="did not start"):
        launch("--budget", "nonsense")


@pytest.mark.parametrize(
    ("options", "env", "parts"),
    [
        (["--budget", "lots"], {}, ["--budget", "lots", "4GiB"]),
        ([], {"KVSTORE_BUDGET": "12 parsec"}, ["KVSTORE_BUDGET", "12 parsec", "4GiB"]),
        ([], {"KVSTORE_MAX_SESSIONS": "many"}, ["KVSTORE_MAX_SESSIONS", "many"]),
        (["--max-sessions", "0"], {}, ["--max-sessions", "0"]),
        (["--device", "tpu:0"], {}, ["--device", "tpu:0", "cpu", "cuda:N"]),
        (["--device", "GPU-xyz"], {}, ["--device", "GPU-xyz", "UUID"]),
        ([], {"KVSTORE_DEVICE": "cuda:-1"}, ["--device", "cuda:-1"]),
        (["--device", "cuda", "--slab-kind", "fabric"], {}, ["--slab-kind", "fabric", "legacy"]),
        (["--slab-kind", "vmm"], {}, ["--slab-kind vmm", "--device cuda"]),
        (["--listen", "7400"], {}, ["--listen", "7400", "host:port"]),
        (["--listen", "0.0.0.0:7400"], {}, ["0.0.0.0:7400", "loopback", "--insecure"]),
        (["--log-level", "loud"], {}, ["--log-level", "loud"]),
    ],
)
def test_a_wrong_setting_is_named_with_a_remedy(launch, options, env, parts):
    result = run_serve(launch.address, *options, env={**os.environ, **env})
    assert result.returncode == 2
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_path_too_long_for_a_socket_is_named(launch):
    result = run_serve(launch.folder / ("x" * 100) / "kv.sock")
    assert result.returncode == 2
    assert "shorter path" in result.stderr


def test_a_folder_that_can_not_be_made_is_named(launch):
    (launch.folder / "file").write_text("")
    result = run_serve(launch.folder / "file" / "kv.sock")
    assert result.returncode == 2
    assert "--address" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_tcp_port_in_use_is_named(launch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_serve(launch.address, "--listen", f"127.0.0.1:{port}")
    assert result.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not launch.address.exists()


def test_neither_process_imports_more_than_it_needs():
    code = "import sys, {}; print(*(m for m in {} if m in sys.modules))"
    heavy = "('torch', 'transformers', 'kvstore_client')"
    cases = (("kvstore.supervisor.process", f"('grpc', 'numpy', *{heavy})"), ("kvstore.server.process", heavy))
    for module, forbidden in cases:
        command = [sys.executable, "-c", code.format(module, forbidden)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        assert result.stdout.strip() == "", module
