"""Debian's Chromium, driven over its own protocol; nothing is downloaded."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ,
    reason="no chromium here (`apt-get install chromium`); .ci/run installs it",
)


@dataclass  # playwright writes into whoever listens: no slots
class Visit:
    """A page, and what it did that it should not."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    """Errors on the console, and requests to anywhere else."""

    def __post_init__(self) -> None:
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        # The answer's own status, which tests ask for, is no fault of the page.
        is_status = "Failed to load resource" in message.text
        if message.type in ("error", "warning") and not is_status:
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.origin + "/", "data:")):
            self.complaints.append(f"asked {request.url}")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A browser with a fresh profile, which is gone at the end."""
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=_FLAGS
        )
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def visiting(
    chromium: Browser, origin: str, *, width: int = 1280, **options: Any
) -> AsyncIterator[Visit]:
    """The operator's page, opened and live."""
    context = await chromium.new_context(
        viewport={"width": width, "height": 900}, **options
    )
    try:
        visit = Visit(await context.new_page(), origin)
        await visit.page.goto(origin + "/kvloom/")
        yield visit
    finally:
        await context.close()
