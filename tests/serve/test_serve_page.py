"""The pages as they are served, and the chat page at work with the real model in a real browser."""

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
from page_support import answered, ask, browser, launch_firefox, page, watch  # noqa: F401
from serve_support import KEY, Server, wait

from dsv4.serve.files import PATHS

FOLDER = Path(__file__).parents[2] / "dsv4" / "serve" / "page"
# As `python -m recipes.page_libraries` writes them, from archives with the digests pinned there.
VENDORED = {
    "markdown-it": "1de89b7de286b88cc61b8f2f339fe12ae843c94754e3df10b6fa7032e9ddb7f6",
    "prismjs": "9a922b3f549f4fd9a96e2609dafd0de0d0735f14382550956b7f2e52bf01fc55",
    "temml": "f598c5ca5ea10a950eaec7ed7b00b45345c5aff41184cd265428d6d84f0fdc96",
}
OWN = [path for path in PATHS if path.parent.name != "vendor"]


def test_pages_need_the_key_and_forbid_all_but_themselves(server: Server) -> None:
    for path in ("/", "/status"):
        status, _, headers = server.raw("GET", path, key=None)
        assert status == 401 and headers["www-authenticate"].startswith("Basic")
    connection = server.connection()
    password = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    connection.request("GET", "/", headers={"Authorization": f"Basic {password}"})
    assert connection.getresponse().status == 200
    connection.close()
    for bad in ("Basic", "Basic ?", "Basic " + base64.b64encode(b":wrong").decode()):
        connection.request("GET", "/", headers={"Authorization": bad})
        assert connection.getresponse().status == 401
        connection.close()
    assert server.raw("GET", "/page/main.js", key=None)[0] == 401
    assert len(PATHS) > 20
    for path in PATHS.values():
        status, _, headers = server.raw("GET", path)
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy and "trusted-types 'none'" in policy
        assert headers["x-dns-prefetch-control"] == "off"
        again = server.raw("GET", path, **{"If-None-Match": headers["etag"]})
        assert again[0] == 304 and again[1] == ""


def test_files_are_small_and_ours_name_no_other_place() -> None:
    assert sum(path.stat().st_size for path in PATHS) < 500_000
    for path in OWN:
        text = path.read_text()
        lines = text.splitlines()
        assert len(lines) <= 500, f"{path.name}: split by responsibility"
        assert max(map(len, lines)) <= 110, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
            path.name
        )
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path.name


def test_libraries_are_the_pinned_ones_with_their_licences() -> None:
    for name, digest in VENDORED.items():
        data = (FOLDER / "vendor" / f"{name}.js").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, f"{name}: run python -m recipes.page_libraries"
        assert "MIT" in (FOLDER / "vendor" / f"{name}.LICENSE").read_text()


def test_all_modules_are_loaded_in_advance() -> None:
    html = (FOLDER / "index.html").read_text()
    found = set(re.findall(r'modulepreload" href="/page/(.+?)"', html))
    lazy = {"theme.js", "status.js", "vendor/prismjs.js", "vendor/temml.js"}
    modules = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.js")}
    assert found == modules - lazy


def test_about_tells_the_models_facts(server: Server) -> None:
    status, about, _ = server.raw("GET", "/page/about")
    assert status == 200 and about["is_embedded"] and about["name"] == "tiny"
    assert about["formats"][0] == "nvfp4" and 13e6 < about["parameters"] < 14e6
    assert about["context"] == 1024 and about["max_batch"] == 3 and about["thinking"] is True
    assert server.raw("GET", "/page/about", key=None)[0] == 401


def test_the_log_says_where_the_page_is_and_not_each_of_its_files(server: Server) -> None:
    for path in ("/", "/status", "/page/main.js"):
        server.raw("GET", path)
    assert f"/v1, a chat page at http://127.0.0.1:{server.port}/\n" in server.log
    assert "route=/ status=200" in server.log and "route=/status status=200" in server.log
    assert "/page/" not in server.log
    lines = server.log.splitlines()
    assert lines[0].startswith("no model named")
    assert all(re.match(r"time=\d{4}-\d\d-\d\dT[\d:.]{12}\+00:00 \S", line) for line in lines[1:])


def test_question_is_answered_as_a_stream(page: Any, server: Server) -> None:  # noqa: F811
    page.click("text=Add two numbers")
    page.wait_for_selector(".assistant details:not([hidden])")
    while page.locator("[aria-busy]").count():
        time.sleep(0.02)
    assert page.text_content(".assistant .content") == "27 + 58 = 85."
    assert not page.is_visible(".thought"), "the thought is folded"
    assert re.fullmatch(r"Thought · [\d.]+ s · 34 tokens", page.inner_text(".assistant summary"))
    page.click(".assistant summary")
    assert "15" in page.inner_text(".thought")
    assert re.search(r"46 tokens · [\d.]+ tokens/s · prompt 14", page.inner_text(".assistant .facts"))
    assert page.inner_text("#context") == "60 / 1,024"
    assert page.text_content("#model") == "tiny"

    ask(page, "Write a long story with the words boat, blue and jump.")
    page.wait_for_selector("#stop:not([hidden])")
    seen = set[str]()

    def grows() -> bool:
        seen.add(page.locator(".assistant .content").last.text_content())
        return len(seen) > 4 and max(map(len, seen)) > 20

    wait(grows, 20)
    page.keyboard.press("Escape")
    last = answered(page)
    assert "stopped" in last.locator(".facts").inner_text()
    wait(server.is_idle, 5)
    begun = last.locator(".content").inner_text()
    page.click("text=Continue")
    wait(lambda: len(page.locator(".assistant .content").last.inner_text()) > len(begun) + 5, 20)
    page.keyboard.press("Escape")
    assert answered(page).locator(".content").inner_text().startswith(begun)
    assert page.locator(".turn").count() == 4
    page.click("#new")
    assert page.locator(".turn").count() == 0
    wait(server.is_idle, 5)


@pytest.mark.parametrize("browser", [pytest.param("firefox", marks=pytest.mark.slow)], indirect=True)
def test_firefox_runs_the_page_under_its_policy(browser: Any, server: Server, tmp_path: Path) -> None:  # noqa: F811
    """In the other tests Firefox gets the pages without it."""
    firefox = launch_firefox(browser.browser_type, tmp_path, KEEP_POLICY="1")
    origin = f"http://127.0.0.1:{server.port}/"
    tab = firefox.new_context(http_credentials={"username": "", "password": KEY}).new_page()
    complaints = watch(tab, origin)
    tab.goto(origin)
    tab.wait_for_selector(".example")
    tab.keyboard.type("What is 27 + 58?")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=27 + 58 = 85.")
    tab.goto(f"{origin}status")
    tab.wait_for_selector("text=Time to first token")
    assert not [words for words in complaints if "JavaScript eval" not in words], "Playwright's own"
    firefox.close()


def test_status_page_is_drawn(browser: Any, server: Server) -> None:  # noqa: F811
    server.chat()
    context = browser.new_context(http_credentials={"username": "", "password": KEY})
    status = context.new_page()
    status.goto(f"http://127.0.0.1:{server.port}/status")
    status.wait_for_selector("text=Time to first token")
    titles = status.locator(".card h2").all_inner_texts()
    assert titles[:5] == ["Requests", "Generation", "Time to first token", "Prompts", "Memory"]
    wait(lambda: "Model" in status.locator(".card h2").all_inner_texts(), 5)
    assert status.inner_text("#state") == "Ready" and "NaN" not in status.inner_text("main")
    assert "13.7 M parameters" in status.inner_text("main")
    assert re.search(r"Host memory\s+[\d.]+ GB of [\d.]+ GB", status.inner_text("main"))
    before = status.locator(".card:has-text('Generation') dd").first.inner_text()
    server.chat()
    wait(lambda: status.locator(".card:has-text('Generation') dd").first.inner_text() != before, 5)
    context.close()
