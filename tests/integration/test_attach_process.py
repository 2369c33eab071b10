"""Attaching to a real torch trainer from the command line, and everything that may end it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mxprobe.attach import gdb
from mxprobe.attach.process import look_up
from mxprobe.attach.rundir import RunDirectory, attached, clean_stale
from mxprobe.errors import AttachError
from mxprobe.trace import open_trace
from tests.attach_targets import (
    MXPROBE,
    Trainer,
    mxprobe,
    nothing_left,
    running,
    statements_in_memory,
    training,
    until,
)

SCHEDULE = ("--every", "5", "--weights-every", "20")


@pytest.fixture(autouse=True)
def private_base(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Sockets of these tests are not mixed up with those of other attachments; a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="mxp-", dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, f"mxprobe-{os.getuid()}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Trainer]:
    """One trainer for the tests that leave it as they found it."""
    with training(tmp_path_factory.mktemp("trainer")) as trainer:
        yield trainer


@contextmanager
def attaching(trainer: Trainer, trace: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """`mxprobe attach` in the foreground, recording."""
    command = [*MXPROBE, "attach", trainer.pid, "-o", str(trace), *SCHEDULE, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (trace / "run.json").exists() or process.poll() is not None, timeout_s=40)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def run_facts(trace: Path) -> dict[str, Any]:
    return json.loads((trace / "run.json").read_text())


def test_status_and_detach_round_trip(shared: Trainer, tmp_path: Path, private_base: Path) -> None:
    before, trace = shared.residue(), tmp_path / "a.mxprobe"
    done = mxprobe("attach", shared.pid, "-o", str(trace), "--background", *SCHEDULE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{trace}\n"
    shared.wait_for_steps(30)

    status = [s for s in json.loads(mxprobe("status", "--json").stdout) if s["pid"] == shared.process.pid]
    assert len(status) == 1
    assert (status[0]["phase"], status[0]["mechanism"], status[0]["role"]) == ("recording", "ptrace", "trainer")
    assert status[0]["directory"] == str(trace)
    assert status[0]["agent"]["steps"] > 0
    in_words = mxprobe("status", shared.pid).stdout
    assert str(trace) in in_words
    assert re.search(r"\d+\.\d\d% of the step time in our hooks, \d+\.\d\d% lost to our own thread\n", in_words)

    again = mxprobe("attach", shared.pid, "-o", str(tmp_path / "b.mxprobe"))
    assert again.returncode == 4
    assert "already attached" in again.stderr
    assert not (tmp_path / "b.mxprobe").exists()

    done = mxprobe("detach", shared.pid)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{trace}\n"
    opened = open_trace(trace)
    assert opened.is_complete
    assert opened.problems == []
    assert set(opened.tensors().role) >= {"x_fwd", "w_fwd", "g_dgrad"}
    assert f"attached to {shared.pid}" in (trace / "mxprobe.log").read_text()

    facts = run_facts(trace)
    assert facts["target"]["pid"] == shared.process.pid
    assert facts["target"]["python"] == sys.version.split()[0]
    assert facts["target"]["cmdline"][0] == sys.executable
    assert facts["config"]["every"] == 5
    assert 0 < facts["pause_ms"] < 1000
    assert 0 < facts["unmap_pause_ms"] < 1000
    assert facts["attach_latency_ms"] > facts["pause_ms"]
    assert facts["started_ns"] < facts["ended"]["time_ns"]
    assert (facts["ended"]["reason"], facts["role"]) == ("detached", "trainer")
    assert facts["agent"]["n_dropped"] == 0

    assert shared.residue() == before
    assert nothing_left(before)
    assert statements_in_memory(shared.process.pid) == 0
    assert list(private_base.iterdir()) == []
    assert mxprobe("detach", shared.pid).returncode == 4


@pytest.mark.skipif(not gdb.is_here(), reason="needs gdb")
def test_by_gdb_where_it_is_asked_for(shared: Trainer, tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    done = mxprobe("attach", shared.pid, "-o", str(trace), "--via", "gdb", "--duration", "0.5", *SCHEDULE)
    assert done.returncode == 0, done.stderr
    facts = run_facts(trace)
    assert (facts["mechanism"], facts["ended"]["reason"]) == ("gdb", "duration")
    assert facts["unmap_pause_ms"] > 0
    assert nothing_left(shared.residue())
    assert statements_in_memory(shared.process.pid) == 0


@pytest.mark.parametrize(
    ("via", "words"),
    [("listener", "does not listen for an attach"), ("remote_exec", "not Python 3.14 or newer")],
)
def test_a_way_in_that_is_not_open_is_not_replaced_by_another(
    via: str, words: str, shared: Trainer, tmp_path: Path
) -> None:
    done = mxprobe("attach", shared.pid, "-o", str(tmp_path / "a"), "--via", via)
    assert done.returncode == 4
    assert words in done.stderr
    assert not (tmp_path / "a").exists()


def test_ctrl_c_closes_the_trace_and_exits_0(shared: Trainer, tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    with attaching(shared, trace) as controller:
        shared.wait_for_steps(20)
        controller.send_signal(signal.SIGINT)
        out, err = controller.communicate(timeout=30)
        assert controller.returncode == 0
    assert out == f"{trace}\n"
    assert "detached after " in err
    assert open_trace(trace).is_complete
    assert run_facts(trace)["ended"]["reason"] == "interrupted"
    assert nothing_left(shared.residue())


def test_duration(shared: Trainer, tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    done = mxprobe("attach", shared.pid, "-o", str(trace), "--duration", "0.5s", *SCHEDULE)
    assert done.returncode == 0, done.stderr
    assert run_facts(trace)["ended"]["reason"] == "duration"
    again = mxprobe("attach", shared.pid, "-o", str(trace))
    assert again.returncode == 2
    assert "already holds a trace" in again.stderr
    assert nothing_left(shared.residue())


def test_controller_killed_the_agent_leaves_and_the_directory_is_cleaned(
    shared: Trainer, tmp_path: Path, private_base: Path
) -> None:
    trace = tmp_path / "a.mxprobe"
    with attaching(shared, trace) as controller:
        shared.wait_for_steps(40)
        assert not nothing_left(shared.residue())
        controller.kill()
        controller.wait()
        until(lambda: nothing_left(shared.residue()), timeout_s=20)
    shared.wait_for_steps(3)
    assert not open_trace(trace).tensors().empty
    leftover = private_base / f"{shared.pid}.{look_up(shared.process.pid).start_ticks}"
    assert leftover.exists()
    assert shared.process.pid not in dict(attached())
    done = mxprobe("attach", shared.pid, "-o", str(tmp_path / "b.mxprobe"), "--duration", "0.3")
    assert done.returncode == 0, done.stderr
    assert list(private_base.iterdir()) == []


def test_attach_and_detach_again_and_again_changes_no_bit(tmp_path: Path) -> None:
    for name in ("control", "attached"):
        (tmp_path / name).mkdir()
    with training(tmp_path / "attached") as trainer:
        for i in range(3):
            done = mxprobe(
                "attach", trainer.pid, "-o", str(tmp_path / f"{i}.mxprobe"), "--duration", "0.3", "--every", "2"
            )
            assert done.returncode == 0, done.stderr
            trainer.wait_for_steps(5)
        assert nothing_left(trainer.residue())
        seen = trainer.losses()
    with training(tmp_path / "control", environ={"PAUSE_S": "0"}) as control:
        until(lambda: len(control.losses()) >= len(seen), timeout_s=60)
        assert control.losses()[: len(seen)] == seen


def test_the_end_of_the_process_ends_the_attachment(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    with training(tmp_path) as trainer, attaching(trainer, trace) as controller:
        trainer.wait_for_steps(20)
        (tmp_path / "stop").touch()
        assert trainer.process.wait(20) == 0
        _, err = controller.communicate(timeout=30)
        assert controller.returncode == 0
    assert "the process has ended" in err
    assert open_trace(trace).is_complete


def test_kill_9_of_the_process_keeps_what_was_recorded(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    with training(tmp_path) as trainer, attaching(trainer, trace) as controller:
        trainer.wait_for_steps(30)
        until(lambda: list(trace.glob("live/rank=0/tensors*")))
        trainer.process.kill()
        _, err = controller.communicate(timeout=30)
        assert controller.returncode == 0
    assert "the process has ended" in err
    assert run_facts(trace)["ended"]["reason"] == "target_exited"
    assert open_trace(trace).is_complete
    assert not open_trace(trace).tensors().empty


def test_a_child_that_inherited_the_connection_does_not_keep_the_attachment_alive(tmp_path: Path) -> None:
    """Data loader workers are forked with every descriptor of their parent."""
    go, child = tmp_path / "go", tmp_path / "child"
    program = (
        "import os, time, torch\nmodel = torch.nn.Linear(32, 32)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nprint('up', flush=True)\nforked = False\n"
        "while True:\n    model(torch.ones(2, 32)).sum().backward()\n    optimizer.step()\n    time.sleep(0.01)\n"
        f"    if not forked and os.path.exists({str(go)!r}):\n"
        "        forked = os.fork()\n        if not forked:\n            time.sleep(60)\n"
        f"        open({str(child)!r}, 'w').write(str(forked))\n"
    )
    with running(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True) as process:
        command = [*MXPROBE, "attach", str(process.pid), "-o", str(tmp_path / "a.mxprobe"), *SCHEDULE]
        controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: (tmp_path / "a.mxprobe" / "run.json").exists(), timeout_s=40)
            go.touch()
            until(child.exists)
            process.kill()
            _, err = controller.communicate(timeout=30)
        finally:
            controller.kill()
            controller.communicate()
            os.killpg(process.pid, signal.SIGKILL)
    assert controller.returncode == 0
    assert "the process has ended" in err


def test_a_job_started_by_run_is_entered_through_its_listener(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    with training(tmp_path, prefix=[*MXPROBE, "run", "--"]) as trainer:
        assert "mxprobe" not in trainer.residue()["path"]
        done = mxprobe("attach", trainer.pid, "-o", str(trace), "--duration", "0.5", *SCHEDULE)
        assert done.returncode == 0, done.stderr
        residue = trainer.residue()
        # What `run` put there stays: one thread and its socket; nothing of the agent does.
        assert residue.pop("threads") == ["mxprobe-listener"]
        assert nothing_left(residue, sockets=1)
    facts = run_facts(trace)
    assert (facts["mechanism"], facts["pause_ms"]) == ("listener", 0.0)


def test_run_with_an_output_attaches_by_itself(tmp_path: Path) -> None:
    trace = tmp_path / "a.mxprobe"
    with training(tmp_path, prefix=[*MXPROBE, "run", "-o", str(trace), "--"]) as trainer:
        until(lambda: (trace / "run.json").exists(), timeout_s=40)
        trainer.wait_for_steps(20)
        done = mxprobe("detach", trainer.pid)
        assert done.returncode == 0, (trace / "mxprobe.log").read_text()
    assert open_trace(trace).is_complete


def test_without_torch_and_waiting_for_it(tmp_path: Path) -> None:
    go, trace = tmp_path / "go", tmp_path / "a.mxprobe"
    program = (
        "import os, sys, time\nprint('up', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
        "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n    model(torch.ones(2, 8)).sum().backward()\n    optimizer.step()\n    time.sleep(0.01)\n"
    )
    with running(program, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        done = mxprobe("attach", str(process.pid), "-o", str(trace))
        assert done.returncode == 4
        assert "has not imported torch" in done.stderr
        assert not trace.exists()
        command = [*MXPROBE, "attach", str(process.pid), "-o", str(trace), "--wait", "60", "--duration", "0.3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
            assert waiting.stdout is not None
            assert "waiting for it to import torch" in waiting.stdout.readline()
            go.touch()
            out, _ = waiting.communicate(timeout=60)
            assert waiting.returncode == 0, out
        assert process.poll() is None


def test_a_process_that_does_not_step(tmp_path: Path) -> None:
    program = "import time, torch\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.01)\n"
    with running(program) as process:
        done = mxprobe("attach", str(process.pid), "-o", str(tmp_path / "a"), "--step-timeout", "1")
        assert done.returncode == 4
        assert "took no optimizer step" in done.stderr
        assert not (tmp_path / "a").exists()
        assert process.poll() is None


def test_the_page_of_an_attach_that_was_given_up_goes_with_the_next(tmp_path: Path, private_base: Path) -> None:
    """Still queued then, it had to stay: the interpreter reads it when the main thread is back."""
    go = tmp_path / "go"
    program = (
        "import ctypes, time, torch\nmodel = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nprint('up', flush=True)\n"
        f"ctypes.CDLL(None).system(b'until [ -e {go} ]; do sleep 0.05; done')\n"
        "while True:\n    model(torch.ones(2, 8)).sum().backward()\n    optimizer.step()\n    time.sleep(0.01)\n"
    )
    with running(program, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        pid = str(process.pid)
        done = mxprobe("attach", pid, "-o", str(tmp_path / "a"), "--step-timeout", "1")
        assert done.returncode == 4
        assert statements_in_memory(process.pid) == 1
        go.touch()
        done = mxprobe("attach", pid, "-o", str(tmp_path / "b"), "--duration", "0.3", *SCHEDULE)
        assert done.returncode == 0, done.stderr
        assert statements_in_memory(process.pid) == 0
        assert process.poll() is None
    assert list(private_base.iterdir()) == []


def test_a_process_in_a_long_native_call_is_told_so_and_what_is_queued_stays_harmless(tmp_path: Path) -> None:
    program = "import sys, time, torch\nprint('up', flush=True)\ntime.sleep(6)\nprint(len(sys.modules))\n"
    control = "import sys, time, torch\nprint(len(sys.modules))\n"
    with running(program) as process:
        done = mxprobe("attach", str(process.pid), "-o", str(tmp_path / "a"), "--background", "--step-timeout", "2")
        assert done.returncode == 4
        assert "did not run the agent within 2 s; the main thread is sleeping in clock_nanosleep" in done.stderr
        assert not (tmp_path / "a").exists()
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    assert out == subprocess.check_output([sys.executable, "-c", control], text=True)


def test_directories_of_the_dead_are_removed_and_those_of_the_living_are_not(private_base: Path) -> None:
    with running("import time\nprint('up', flush=True)\ntime.sleep(60)") as process:
        facts = look_up(process.pid)
        directory = RunDirectory.create(facts)
        try:
            assert directory.path.parent == private_base
            assert directory.visible_to(facts)
            clean_stale()
            assert dict(attached())[facts.pid] == directory.control_socket
            with pytest.raises(AttachError) as error:
                RunDirectory.create(facts)
            assert error.value.reason == "already_attached"
        finally:
            directory.close()
    assert list(private_base.iterdir()) == []
    dead = private_base / "4194304.1"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    (private_base / "4194304.listen.sock").touch()
    removed = sorted(path.name for path in clean_stale() if path.parent == private_base)
    assert removed == ["4194304.1", "4194304.listen.sock"]
    assert list(private_base.iterdir()) == []
