"""The chat page in a real browser: streams, stops, tries again, and takes nothing a model writes for HTML."""

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_support import KEY, Server, wait

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH: no browser test")

EVIL = "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><a href='javascript:1'>x</a>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page as a user with the key has it; any complaint of the browser fails the test."""
    # As after the browser's own question for the key, which a headless one cannot show.
    credentials = {"username": "", "password": KEY}
    context = browser.new_context(http_credentials=credentials, viewport={"width": 390, "height": 780})
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: complaints.extend([] if request.url.startswith(page_url) else [request.url]),
    )
    page_url = f"http://127.0.0.1:{server.port}/"
    page.goto(page_url)
    page.complaints = complaints
    yield page
    context.close()
    assert not [text for text in complaints if not text.startswith("data:")]


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


@needs_browser
def test_question_is_answered_as_a_stream(page: Any, server: Server, tmp_path: Path) -> None:
    page.click("#settings-toggle")
    page.fill("#temperature", "0")
    page.click("#settings-toggle")
    ask(page, "What is 27 + 58?")
    page.wait_for_selector(".assistant details:not([hidden])")
    seen = {page.inner_text(".assistant .content")}
    while not page.is_visible(".foot .speed"):
        seen.add(page.text_content(".assistant .content"))
        time.sleep(0.03)
    assert page.text_content(".assistant .content") == "27 + 58 = 85."
    assert len(seen) > 2, "the answer grows before one's eyes"
    assert not page.is_visible("details .text"), "reasoning is folded"
    page.click("summary")
    assert "15" in page.inner_text("details .text")
    assert "tokens/s" in page.inner_text(".foot .speed") and "cached 0" in page.inner_text(".foot .cached")
    assert page.text_content("#model") == "tiny"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, f"fits a phone's screen of 390, not {width}"
    page.screenshot(path=tmp_path / "phone.png")

    ask(page, "Write a long story with the words boat, blue and jump.")
    page.wait_for_selector("#stop:not([hidden])")
    wait(lambda: len(page.locator(".assistant").nth(1).text_content()) > 20, 20)
    page.click("#stop")
    page.wait_for_selector(".assistant:nth-of-type(4) .foot button")
    assert "stopped" in page.inner_text(".assistant:nth-of-type(4) .foot")
    wait(server.is_idle, 5)
    page.click(".assistant:nth-of-type(4) .foot button")
    wait(lambda: len(page.locator(".assistant").nth(1).text_content()) > 20, 20)
    assert page.locator(".turn").count() == 4, "a retry takes the place of what it retries"
    page.click("#stop")
    page.click("#new")
    assert page.locator(".turn").count() == 0
    wait(server.is_idle, 5)


@needs_browser
def test_nothing_written_by_a_model_is_html(page: Any) -> None:
    call = {"index": 0, "id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": EVIL}}
    deltas = [{"reasoning_content": EVIL[:9]}, {"reasoning_content": EVIL[9:]}, {"content": EVIL}]
    choices: list[Any] = [
        {"delta": delta, "finish_reason": None} for delta in [*deltas, {"tool_calls": [call]}]
    ]
    choices.append({"delta": {}, "finish_reason": "tool_calls"})
    usage = {"completion_tokens": 9, "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    chunks = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    sent: list[Any] = []

    def fulfill(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    ask(page, EVIL)
    page.wait_for_selector(".foot .speed")
    assert page.locator("main img, main script, main a").count() == 0
    assert page.text_content(".user") == EVIL and page.text_content(".content") == EVIL
    assert page.text_content("details .text") == EVIL and page.text_content(".call pre") == EVIL
    assert page.evaluate("window.hacked") is None
    page.fill(".call input", "the result")
    page.click("text=Send results")
    wait(lambda: page.locator(".assistant .speed").count() == 2, 10)
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["user", "assistant", "tool"] and sent[1]["messages"][2]["content"] == "the result"
    # Should a line of ours ever forget itself, the browser refuses.
    refused = page.evaluate("(() => { try { document.body.innerHTML = 'x' } catch (e) { return e.name } })()")
    assert refused == "TypeError" and "TrustedHTML" in page.complaints.pop()


@needs_browser
def test_errors_are_shown(page: Any) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body='data: {"error": {"message": "the engine <b>died</b>"}}\n\n',
            content_type="text/event-stream",
        ),
    )
    ask(page, "hi")
    page.wait_for_selector(".error")
    assert page.text_content(".error") == "the engine <b>died</b>"


@needs_browser
def test_the_question_grows_with_its_text(page: Any) -> None:
    def height() -> float:
        return page.locator("#question").bounding_box()["height"]

    empty = height()
    page.fill("#question", "one long line without an end " * 6)
    assert 3 * empty < height() < 0.4 * 780 + 1, "not with its line breaks alone"
    page.fill("#question", "one line")
    assert abs(height() - empty) < 1


@needs_browser
def test_settings_that_are_empty_or_wrong(page: Any) -> None:
    sent: list[Any] = []

    def fulfill(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.abort() if len(sent) > 1 else route.fulfill(body=STREAM, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    page.click("#settings-toggle")
    page.fill("#tools", "[{")
    ask(page, "hi")
    page.wait_for_selector(".error")
    assert page.text_content(".error").startswith("Tools in Settings are not JSON: ") and not sent
    page.fill("#tools", "")
    page.fill("#temperature", "")
    page.click("text=Retry")
    wait(lambda: page.locator(".assistant .content").last.text_content() == "well", 10)
    assert "temperature" not in sent[0], "an empty field is the server's default, not 0"
    ask(page, "again")
    page.wait_for_selector(".error")
    assert page.text_content(".error") == "The server cannot be reached; is it running?"
    page.complaints.clear()


STREAM = 'data: {"choices": [{"delta": {"content": "well"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@needs_browser
def test_what_failed_or_was_left_is_not_sent_again(page: Any) -> None:
    sent: list[list[str]] = []
    fails, held = [True], []

    def fulfill(route: Any) -> None:
        sent.append([message["content"] for message in route.request.post_data_json["messages"]])
        if sent[-1][-1] == "slow":
            held.append(route)
        elif fails.pop() if fails else False:
            route.fulfill(status=500, body='{"error": {"message": "no"}}', content_type="application/json")
        else:
            route.fulfill(body=STREAM, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    ask(page, "first")
    page.wait_for_selector(".error")
    page.complaints.clear()
    ask(page, "second")
    wait(lambda: page.locator(".assistant .content").last.text_content() == "well", 10)
    page.locator("text=Retry").first.click()
    wait(lambda: len(sent) == 3, 10)
    assert sent == [["first"], ["second"], ["first"]]
    ask(page, "slow")
    wait(lambda: bool(held), 10)
    page.click("#new")
    ask(page, "new")
    wait(lambda: page.locator(".assistant .content").last.text_content() == "well", 10)
    held[0].fulfill(body=STREAM.replace("well", "late"), content_type="text/event-stream")
    ask(page, "newer")
    wait(lambda: sent[-1] == ["new", "well", "newer"], 10)
    assert "late" not in page.inner_text("#talk")


def test_page_needs_the_key_and_forbids_all_but_itself(server: Server) -> None:
    status, _, headers = server.raw("GET", "/", key=None)
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
    for path in ("/", "/page.css", "/page.js"):
        status, text, headers = server.raw("GET", path)
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text


def test_the_log_says_where_the_page_is(server: Server) -> None:
    assert f"/v1, a chat page at http://127.0.0.1:{server.port}/\n" in server.log
