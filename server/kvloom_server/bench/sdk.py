"""``kvloom bench sdk``: what the drop-in client adds to a call, and to a start.

The calls are made by a process of their own (``kvloom.testing.overhead``; the
server does not import the SDK), through a router over canned engines.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Final

from kvloom_server.cluster.ports import free_ports

from .contenders import LOOPBACK, EnginePorts, engine_command, kvloom_router
from .meter import cores
from .processes import ProcessFailedError, processes
from .results import Results, Row

MODULES: Final = ("kvloom", "kvloom.protocol", "kvloom.openai", "openai")
CALLS: Final = 12
"""Ways of calling times clients: rows of a repeat."""
_IMPORT: Final = """
import json, sys, time
began = time.process_time()
import {module}
cpu_ms = (time.process_time() - began) * 1e3
print(json.dumps({{"cpu_ms": cpu_ms, "num_modules": len(sys.modules)}}))
"""


def num_steps(repeats: int) -> int:
    """How many steps :func:`measure` will tell of."""
    return repeats * (len(MODULES) + CALLS)


async def measure(
    results: Results, *, repeats: int, calls: int, step: Callable[[str], None]
) -> None:
    """Measure imports, then calls.

    Raises:
        ProcessFailedError: a process did not start, or failed.
    """
    for repeat in range(repeats):
        for module in MODULES:
            step(f"import {module}")
            results.add({**await imported(module), "repeat": repeat})
    _, others = cores()
    ports = free_ports(5)
    prefill = EnginePorts(http=ports[0], lease=ports[1])
    decode = EnginePorts(http=ports[2], lease=ports[3])
    router = kvloom_router((prefill, decode), ports[4], returns=True)
    async with processes() as started:
        for name, engine in (("prefill", prefill), ("decode", decode)):
            command = engine_command(engine)
            await started.start(name, command, port=engine.http, cores=others)
        await started.start(
            "router", router.command, port=ports[4], cores=others, env=router.env
        )
        command = [sys.executable, "-m", "kvloom.testing.overhead"]
        command += [f"--url=http://{LOOPBACK}:{ports[4]}/v1"]
        command += [f"--calls={calls}", f"--repeats={repeats}"]
        await _calls(command, results, step)


async def imported(module: str) -> Row:
    """What importing a module costs a fresh interpreter."""
    said = await _output([sys.executable, "-c", _IMPORT.format(module=module)])
    return {"row": "sdk", "measure": "import", "module": module, **json.loads(said)}


async def _calls(
    command: list[str], results: Results, step: Callable[[str], None]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            row = json.loads(line)
            step(f"{row['call']}: {row['client']}")
            results.add({"row": "sdk", "measure": "call", **row})
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise ProcessFailedError(f"the client's process ended with exit code {code}")


async def _output(command: list[str]) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    if process.returncode != 0:
        raise ProcessFailedError(f"{command[-1]!r} failed")
    return said
