"""A browser for the tests of the pages, and answers made up for what the embedded model would not say."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_support import KEY, ROOT, Server, wait

BROWSERS = {
    "chromium": shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome"),
    "firefox": shutil.which("firefox-esr") or shutil.which("firefox"),
}
BRIDGE = Path(__file__).with_name("bidi_bridge.py")
# Firefox does not tell Playwright what a request sends.
KEEP_BODIES = """{
    const own = fetch;
    globalThis.sentBodies = [];
    globalThis.fetch = (path, options) => {
        if (options?.body) sentBodies.push(options.body);
        return own(path, options);
    };
}"""
ANSWERED = ".assistant:not([aria-busy]) .facts"


@pytest.fixture(scope="module", params=["chromium", pytest.param("firefox", marks=pytest.mark.slow)])
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = BROWSERS[request.param]
    if program is None:
        pytest.skip(f"no {request.param} on the PATH")
    with sync_api.sync_playwright() as play:
        if request.param == "chromium":
            running = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        else:
            running = launch_firefox(play.firefox, tmp_path_factory.mktemp("firefox"))
        yield running
        running.close()


def launch_firefox(kind: Any, folder: Path, **variables: str) -> Any:
    bridge = folder / "firefox"
    bridge.write_text(f'#!/bin/sh\nexec {sys.executable} {BRIDGE} {BROWSERS["firefox"]} "$@"\n')
    bridge.chmod(0o755)
    (folder / "downloads").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DOWNLOADS": str(folder / "downloads"), **variables}
    running = kind.launch(channel="moz-firefox", executable_path=bridge, env=env)
    running.downloads = folder / "downloads"
    return running


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The chat page as a user with the key has it; a complaint of the browser or a foreign request fails."""
    # As after the browser's own question for the key, which a headless one cannot show.
    credentials = {"username": "", "password": KEY}
    context = browser.new_context(http_credentials=credentials, viewport={"width": 1100, "height": 780})
    context.set_default_timeout(10_000)
    context.add_init_script(KEEP_BODIES)
    page = context.new_page()
    page.complaints = watch(page, f"http://127.0.0.1:{server.port}/")
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_selector(".example")
    yield page
    context.close()
    assert not page.complaints


def watch(page: Any, origin: str) -> list[str]:
    """What the browser complains of, and requests that leave the server; both must stay empty."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on(
        "request",
        lambda one: found.extend([] if one.url.startswith((origin, "data:", "blob:")) else [one.url]),
    )
    return found


def is_firefox(page: Any) -> bool:
    return page.context.browser.browser_type.name == "firefox"


def downloaded(page: Any, act: Callable[[], None]) -> Path:
    """The file that this saves."""
    if not is_firefox(page):
        with page.expect_download() as download:
            act()
        return Path(download.value.path())
    folder: Path = page.context.browser.downloads
    before = set(folder.iterdir())

    def new() -> set[Path]:
        return {path for path in folder.iterdir() if path.stat().st_size} - before

    act()
    wait(lambda: len(new()) == 1 and not any(path.suffix == ".part" for path in new()), 10)
    return new().pop()


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def answered(page: Any) -> Any:
    """The last answer, complete."""
    page.wait_for_selector(".assistant[aria-busy]", state="detached")
    return page.locator(".assistant").last


def stream(*deltas: Any, finish: str | None = "stop", usage: bool = True) -> str:
    """An answer as server-sent events: of texts, or of deltas."""
    chunks: list[Any] = []
    for delta in deltas:
        delta = {"content": delta} if isinstance(delta, str) else delta
        logprobs = delta.pop("logprobs", None)
        chunks.append({"choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": None}]})
    if finish:
        chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    if usage:
        used = {"completion_tokens": 9, "prompt_tokens": 30, "total_tokens": 39}
        used["prompt_tokens_details"] = {"cached_tokens": 16}  # type: ignore[assignment]
        chunks.append({"choices": [], "usage": used})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def script(page: Any, *answers: str) -> list[Any]:
    """Give these answers in turn, the last one again and again. -> the bodies that were sent."""
    left, sent = list(answers), []

    def fulfill(route: Any) -> None:
        sent.append(json.loads(route.request.frame.page.evaluate("sentBodies.at(-1)")))
        body = left.pop(0) if len(left) > 1 else left[0]
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    return sent


def said(body: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]
