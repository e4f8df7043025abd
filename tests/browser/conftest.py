"""One server and one browser for all tests; without Chromium or Playwright they are skipped."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIMEOUT = 20_000  # milliseconds
SERVED = runpy.run_path(str(Path(__file__).with_name("served_page.py")))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    if SERVED["CHROMIUM"] is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    sync_api.expect.set_options(timeout=TIMEOUT)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=SERVED["CHROMIUM"], args=SERVED["BROWSER_OPTIONS"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def address(
    browser: Browser,
    tiny_folder: Path,
    translator_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The address of a server with two models, a translator, results, runs and word vectors."""
    options = SERVED["write_folders"](tmp_path_factory.mktemp("served"))
    options += ["--model=calque-mini", f"--model={tiny_folder}"]
    options += [f"--translator={translator_folder}"]
    with SERVED["run_server"](options) as url:
        yield url


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that must end without errors, dialogs and requests to other servers."""
    context = browser.new_context(base_url=address, reduced_motion="reduce")
    context.set_default_timeout(TIMEOUT)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (problems.append("a dialog"), dialog.dismiss()))

    def note_message(message: Any) -> None:
        # Chromium logs every answer that is not a success; a test of an error expects that.
        if message.type in ("error", "warning") and not re.search(
            "status of (4|503)", message.text
        ):
            problems.append(f"console: {message.text}")

    def note_request(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            problems.append(f"request: {request.url}")

    page.on("console", note_message)
    page.on("request", note_request)
    yield page
    context.close()
    assert problems == []
