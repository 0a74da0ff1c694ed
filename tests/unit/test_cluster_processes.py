"""Engine processes: nothing of them is left, whoever ends, and however."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from kvloom_server.cluster import processes
from kvloom_server.cluster.processes import EngineProcess

BOUND_S = 30.0

# A stand-in for an engine: it holds a line to the test for as long as it lives.
LINE = """
import os, signal, socket, sys
line = socket.create_connection(("127.0.0.1", {port}))
{then}
line.sendall(b"up")
signal.pause()
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WITH_CHILD = "os.fork() or signal.signal(signal.SIGTERM, signal.SIG_IGN)"

# What starts an engine and is killed before it can stop it.
SUPERVISOR = """
import asyncio, pathlib, sys
from kvloom_server.cluster.processes import EngineProcess
async def main():
    command = [sys.executable, "-c", sys.argv[2]]
    await EngineProcess.start("e0", command, {}, pathlib.Path(sys.argv[1]))
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Lifeline:
    """Hears of a stand-in's start, and of the end of the last that holds it."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(BOUND_S)
        self.port = self.server.getsockname()[1]
        self.line = None

    def code(self, then=""):
        return LINE.format(port=self.port, then=then)

    async def wait_up(self, num_holders=1):
        self.line, _ = await asyncio.to_thread(self.server.accept)
        self.line.settimeout(BOUND_S)
        for _ in range(num_holders):
            assert await asyncio.to_thread(self.line.recv, 2) == b"up"

    async def wait_gone(self):
        """Until nobody holds the line any more."""
        assert await asyncio.to_thread(self.line.recv, 1) == b""

    def close(self):
        self.server.close()
        if self.line is not None:
            self.line.close()


@pytest.fixture
def life():
    life = Lifeline()
    yield life
    life.close()


@asynccontextmanager
async def engine(code, log, **env):
    process = await EngineProcess.start("e0", [sys.executable, "-c", code], env, log)
    try:
        yield process
    finally:
        await process.stop(grace_s=5.0)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "e0.log"


def test_an_engine_gets_its_environment_and_its_log(log):
    """What it prints is in its file, to the end; its variables are added to
    ours."""

    async def main():
        code = "import os, sys; print(os.environ['MINE'], 'PATH' in os.environ);"
        code += "print('bad', file=sys.stderr); sys.exit(3)"
        async with engine(code, log, MINE="own") as process:
            assert await process.wait() == 3
            assert process.exit_code == 3
            assert sorted(process.log_tail().splitlines()) == ["bad", "own True"]

    asyncio.run(main())


def test_only_the_end_of_a_long_log_is_shown(log):
    """A message about a failed start quotes what matters, binary or not."""
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(1000)))
    tail = EngineProcess("e0", log, process=None).log_tail().splitlines()
    assert tail[-1] == "line 999 \ufffd"
    assert len(tail) == 18


def test_leak_reports_do_not_hide_why_an_engine_ended(log):
    """Libraries print them, hundreds of lines, at the end of any process."""
    cause = "(EngineCore pid=7) RuntimeError: out of memory"
    noise = [
        "nanobind: leaked 514 functions!",
        *(f' - leaked function "create_{number}"' for number in range(40)),
        ' - leaked instance 0x7f7107139108 of type "triton.ir.attribute"',
        " - ... skipped remainder",
        "nanobind: this is likely caused by a reference counting issue in the "
        "binding code.",
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:224: UserWarning: "
        "resource_tracker: There appear to be 1 leaked shared_memory objects",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    ]
    log.write_text("\n".join(["line", cause, *noise]))
    assert EngineProcess("e0", log, process=None).log_tail() == f"line\n{cause}"


def test_an_engine_that_heeds_the_signal_is_not_killed(log, life):
    """It gets the time to tidy up."""

    async def main():
        async with engine(life.code(), log) as process:
            await life.wait_up()
            assert process.exit_code is None
            await process.stop()
            assert process.exit_code == -signal.SIGTERM
            await life.wait_gone()
            await process.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("then", "num_holders"), [(STUBBORN, 1), (WITH_CHILD, 2)], ids=["itself", "child"]
)
def test_what_does_not_heed_the_signal_is_killed(log, life, then, num_holders):
    """An engine that hangs, or its child that stays, is gone after ``stop``."""

    async def main():
        async with engine(life.code(then), log) as process:
            await life.wait_up(num_holders)
            await process.stop(grace_s=0.1)
            await life.wait_gone()
            assert process.exit_code is not None

    asyncio.run(main())


def test_children_of_an_engine_that_crashed_are_ended_too(log, life):
    """An API server that dies leaves its engine core: ``stop`` finds it."""

    async def main():
        async with engine(life.code(WITH_CHILD), log) as process:
            await life.wait_up(2)
            os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            await process.stop()
            await life.wait_gone()

    asyncio.run(main())


def test_a_second_interrupt_does_not_leave_an_engine(log, life):
    """Stopping that is itself cancelled ends the engine at once."""

    async def main():
        async with engine(life.code(STUBBORN), log) as process:
            await life.wait_up()
            stopping = asyncio.create_task(process.stop())
            await asyncio.sleep(0)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            await life.wait_gone()
            await process.wait()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="the leash needs Linux")
def test_an_engine_does_not_outlive_a_supervisor_that_was_killed(log, life):
    """``kill -9`` of ``kvloom up`` leaves no engine behind."""

    async def main():
        command = [sys.executable, "-c", SUPERVISOR, str(log), life.code()]
        supervisor = await asyncio.create_subprocess_exec(*command)
        try:
            await life.wait_up()
        finally:
            supervisor.kill()
            await supervisor.wait()
        await life.wait_gone()

    asyncio.run(main())


def test_a_leash_whose_parent_is_gone_starts_nothing(tmp_path):
    """The supervisor died in between: the engine is not started at all."""
    mark = tmp_path / "started"
    command = [sys.executable, "-m", "kvloom_server.cluster.leash", "1"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", f"open({str(mark)!r}, 'w')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "not started, its parent 1 is gone" in ended.stderr
    assert not mark.exists()


def test_a_command_that_is_none_ends_and_says_so(log):
    """A missing program is an engine that ended, with the reason in its log."""

    async def main():
        process = await EngineProcess.start("e0", ["/no/such/program"], {}, log)
        assert await process.wait() != 0
        assert "/no/such/program" in process.log_tail() or "No such file" in (
            process.log_tail()
        )
        await process.stop()

    asyncio.run(main())


def test_the_grace_is_long_enough_for_an_engine():
    """vLLM needs seconds to free its memory and sockets."""
    assert processes.STOP_GRACE_S >= 10


def test_the_first_error_of_a_log_is_shown_before_its_end(log):
    """What follows from it fills the last lines: the cause must not be lost."""
    cause = "(EngineCore pid=7) ERROR 11-29 [core.py:1510] ZMQError: in use"
    warning = "WARNING this can cause fd limit errors like `OSError: [Errno 24]`"
    rest = [f"  at line {number}" for number in range(100)]
    log.write_text("\n".join([warning, cause, *rest, "RuntimeError: it failed"]))
    shown = EngineProcess("e0", log, process=None).log_tail().splitlines()
    assert shown[0] == cause
    assert shown[-1] == "RuntimeError: it failed"


def test_an_engines_end_is_told_in_twenty_lines(log):
    """The sentence, the cause, the end of the log, and the sentence again: nobody
    has to scroll up for it."""
    cause = "RuntimeError: no memory"
    rest = ["", "x" * 5000, *(f"  at line {number}" for number in range(16)), "  "]
    log.write_text("\n".join([cause, *["lost"] * 50, *rest]))
    told = EngineProcess("e0", log, process=None).end_told("e0 ended.").splitlines()
    assert len(told) == 20
    assert told[0] == f"e0 ended. The end of {log}:"
    assert told[1] == cause
    assert told[-2] == "  at line 15"
    assert told[-1] == "e0 ended."
    assert max(map(len, told)) < 400


def test_an_earlier_run_in_the_same_log_is_no_cause(log):
    """`--log-dir` keeps logs; what ended the engine of last week did not end this
    one."""
    log.write_text("RuntimeError: last week\n" * 100)

    async def main():
        async with engine("print('ValueError: now'); raise SystemExit(3)", log) as own:
            await own.wait()
            assert own.log_tail() == "ValueError: now"

    asyncio.run(main())
    assert log.read_text().startswith("RuntimeError: last week\n")


def test_of_a_log_that_grew_for_days_only_the_end_is_read(log):
    """Whole lines of it."""
    with log.open("w") as out:
        out.write("RuntimeError: of the first hour\n")
        out.writelines(f"{number:0100d}\n" for number in range(30_000))
        out.write("RuntimeError: of the last\n")
    shown = EngineProcess("e0", log, process=None).log_tail().splitlines()
    assert shown[-1] == "RuntimeError: of the last"
    assert "RuntimeError: of the first hour" not in shown
    assert all(len(line) == 100 for line in shown[:-1])


def test_an_engines_children_end_when_its_end_is_seen(log, life):
    """Not when the cluster is stopped, hours later, and its number is perhaps
    somebody else's."""

    async def main():
        async with engine(life.code(WITH_CHILD), log) as process:
            await life.wait_up(2)
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await life.wait_gone()

    asyncio.run(main())


def test_what_has_ended_gets_no_signal_any_more(log, monkeypatch):
    """Neither by `terminate` nor by `stop`."""
    signals = []

    async def main():
        async with engine("", log) as process:
            await process.wait()
            monkeypatch.setattr(os, "killpg", lambda *sent: signals.append(sent))
            process.terminate()
            await process.stop()

    asyncio.run(main())
    assert signals == []
