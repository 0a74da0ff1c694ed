"""Background tasks that must not die unseen."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def started(work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """A task that runs until it is cancelled; that it ends is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


async def stopped(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.critical(
            "event=background_task_died task=%s: restart the router and report this",
            task.get_name(),
            exc_info=task.exception(),
        )
