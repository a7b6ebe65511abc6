"""What the chat page keeps: conversations, versions, drafts, files, the place that is being read."""

import json
import shutil
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from page_support import (  # noqa: F401
    ANSWERED,
    KEEP_BODIES,
    answered,
    ask,
    browser,
    downloaded,
    page,
    said,
    script,
    stream,
    watch,
)
from serve_support import KEY, STORY, Server, wait

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def texts(page: Any) -> list[str]:  # noqa: F811
    return page.locator(".turn .bubble, .turn .content").all_inner_texts()


def titles(page: Any) -> list[str]:  # noqa: F811
    return page.locator("#list .open").all_inner_texts()


def option(page: Any, title: str, name: str) -> None:  # noqa: F811
    page.locator(f"#list li:has-text('{title}')").last.hover()
    page.locator(f"[aria-label='Options for {title}']").last.click()
    page.click(f".menu >> text={name}")


def test_conversations_are_kept_searched_renamed_and_deleted(page: Any) -> None:  # noqa: F811
    script(page, stream("an apple"), stream("a pear"))
    ask(page, "first question")
    answered(page)
    page.click("#new")
    ask(page, "second question")
    answered(page)
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert texts(page) == ["second question", "a pear"], "the open one is opened again"
    assert titles(page) == ["second question", "first question"]
    page.fill("#search", "APPLE")
    wait(lambda: titles(page) == ["first question"], 5)
    page.fill("#search", "")
    wait(lambda: len(titles(page)) == 2, 5)
    option(page, "first question", "Rename")
    page.fill("#list input", "Fruit")
    page.press("#list input", "Enter")
    wait(lambda: "Fruit" in titles(page), 5)
    option(page, "Fruit", "Delete")
    wait(lambda: titles(page) == ["second question"], 5)
    page.click("text=Undo")
    wait(lambda: len(titles(page)) == 2, 5)
    assert texts(page) == ["first question", "an apple"]
    option(page, "Fruit", "Delete")
    wait(lambda: titles(page) == ["second question"], 5)
    page.reload()
    page.wait_for_selector("body.is-ready")
    assert titles(page) == ["second question"]


def test_exports_are_imported(page: Any, tmp_path: Path) -> None:  # noqa: F811
    script(page, stream({"reasoning_content": "thought"}, "**an** answer"))
    ask(page, "a question")
    answered(page)
    for name, suffix in (("Export as JSON", "json"), ("Export as Markdown", "md")):
        path = tmp_path / f"kept.{suffix}"
        shutil.copy(downloaded(page, partial(option, page, "a question", name)), path)
        page.set_input_files("#import-file", path)
        page.wait_for_selector(f"text=1 conversation imported from kept.{suffix}")
    wait(lambda: titles(page) == ["a question"] * 3, 5)
    assert "## Assistant\n\n**an** answer" in (tmp_path / "kept.md").read_text()
    for at in (1, 2):
        page.locator("#list .open").nth(at).click()
        page.wait_for_selector(f"#list li:nth-child({at + 2}).current")
        assert texts(page) == ["a question", "an answer"]
    data = json.loads((tmp_path / "kept.json").read_text())
    data["conversations"][0]["turns"][0]["content"] = 5
    (tmp_path / "bad.json").write_text(json.dumps(data))
    (tmp_path / "other.json").write_text("{}")
    page.set_input_files("#import-file", [tmp_path / "bad.json", tmp_path / "other.json"])
    page.wait_for_selector("text=bad.json: The file has a turn that is damaged")
    page.wait_for_selector("text=other.json: The file is JSON without")
    assert len(titles(page)) == 3


def test_edits_and_retries_are_versions(page: Any) -> None:  # noqa: F811
    sent = script(page, *[stream(f"answer {number}") for number in range(5)])
    ask(page, "one")
    answered(page)
    ask(page, "two")
    answered(page)
    page.locator("[aria-label=Retry]").first.click()
    wait(lambda: texts(page) == ["one", "answer 2"], 5)
    assert page.inner_text(".assistant .branches") == "2/2"
    page.click("[aria-label='Previous version']")
    assert texts(page) == ["one", "answer 0", "two", "answer 1"], "what followed is still there"
    page.locator(".user").nth(1).hover()
    page.locator("[aria-label=Edit]").nth(1).click()
    page.fill("textarea.edit", "zwei")
    page.click(".edit-form >> text=Send")
    answered(page)
    assert texts(page) == ["one", "answer 0", "zwei", "answer 3"]
    assert said(sent[3]) == [("user", "one"), ("assistant", "answer 0"), ("user", "zwei")]
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert texts(page) == ["one", "answer 0", "zwei", "answer 3"]
    ask(page, "three")
    answered(page)
    assert said(sent[4])[2:] == [("user", "zwei"), ("assistant", "answer 3"), ("user", "three")]


def test_what_is_sent_is_what_is_shown(page: Any) -> None:  # noqa: F811
    sent = script(page, 'data: {"error": {"message": "no"}}\n\n', stream("well"))
    ask(page, "first")
    page.wait_for_selector(".error:not([hidden])")
    assert page.inner_text(".error span") == "no"
    ask(page, "second")
    answered(page)
    assert said(sent[1]) == [("user", "first"), ("user", "second")], "both are shown"
    page.locator("[aria-label=Retry]").first.click()
    wait(lambda: texts(page) == ["first", "well"], 5)
    assert said(sent[2]) == [("user", "first")]


def test_an_answer_goes_on_while_another_conversation_is_open(page: Any, server: Server) -> None:  # noqa: F811
    ask(page, "Tell me a short story about a cat.")
    page.wait_for_selector(".thinking:not([hidden])")
    page.click("#new")
    assert page.locator(".turn").count() == 0 and page.is_visible("#send")
    page.wait_for_selector("#list .pulse")
    page.locator("#list .open").first.click()
    page.wait_for_selector(".assistant[aria-busy]")
    length = len(page.inner_text(".assistant"))
    wait(lambda: len(page.inner_text(".assistant")) > length, 10)
    page.reload()  # in the middle of it
    page.wait_for_selector(".assistant .facts:has-text('interrupted')")
    assert page.is_visible("text=Continue")
    wait(server.is_idle, 10)


def test_two_tabs_do_not_overwrite_each_other(page: Any) -> None:  # noqa: F811
    script(page, stream("one"))
    ask(page, "question one")
    answered(page)
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(ANSWERED)
    script(other, stream("two"))
    ask(other, "question two")
    answered(other)
    wait(lambda: texts(page) == ["question one", "one", "question two", "two"], 5)
    script(page, stream("three"))
    ask(page, "question three")
    answered(page)
    wait(lambda: texts(other) == texts(page) and len(texts(page)) == 6, 5)
    other.close()


def test_storage_that_is_full_or_forbidden_is_told(browser: Any, server: Server) -> None:  # noqa: F811
    refused = "IDBFactory.prototype.open = () => { throw new DOMException('denied', 'SecurityError') };"
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') };"
    for broken, words in ((refused, "does not keep conversations here"), (full, "storage is full")):
        context = browser.new_context(http_credentials={"username": "", "password": KEY})
        context.add_init_script(KEEP_BODIES)
        context.add_init_script(broken)
        tab = context.new_page()
        complaints = watch(tab, f"http://127.0.0.1:{server.port}/")
        tab.goto(f"http://127.0.0.1:{server.port}/")
        tab.wait_for_selector(".example")
        script(tab, stream("well"))
        ask(tab, "question")
        answered(tab)
        tab.wait_for_selector(f".toast:has-text('{words}')")
        tab.click("#new")
        tab.locator("#list .open").first.click()
        tab.wait_for_selector(ANSWERED)
        assert texts(tab) == ["question", "well"], "kept in the tab"
        assert not complaints
        context.close()


def test_another_key_can_be_entered(page: Any) -> None:  # noqa: F811
    used: list[str | None] = []

    def fulfill(route: Any) -> None:
        used.append(route.request.headers.get("authorization"))
        if used[-1] == "Bearer the-new-key":
            return route.fulfill(body=stream("well"), content_type="text/event-stream")
        refused = {"error": {"message": "Incorrect API key provided, or none"}}
        return route.fulfill(status=401, body=json.dumps(refused), content_type="application/json")

    page.route("**/v1/chat/completions", fulfill)
    ask(page, "hi")
    page.wait_for_selector(".error:not([hidden])")
    assert "refused the API key" in page.inner_text(".error span")
    page.click("text=Enter the key")
    page.fill("#set-key", "the-new-key")
    page.keyboard.press("Escape")
    page.click("[aria-label=Retry]")
    assert answered(page).locator(".content").inner_text() == "well"
    page.complaints.clear()  # the browser's own line on the 401


def test_settings_are_checked_sent_and_reset(page: Any) -> None:  # noqa: F811
    sent = script(page, stream("well"))
    page.click("#settings-toggle")
    page.fill("#set-tools", "[{")
    page.fill("#set-system", "Be brief.")
    page.keyboard.press("Escape")
    ask(page, "hi")
    page.wait_for_selector("text=Tools in Settings: not JSON")
    assert page.evaluate("document.activeElement.id") == "set-tools" and not sent
    page.fill("#set-tools", "")
    page.fill("#set-top_p", "0.5")
    page.fill("#set-stop", "END")
    assert page.get_attribute("#set-temperature", "placeholder") == "0.6", "the model's default"
    page.select_option("#set-format", "schema")
    page.fill("#set-schema", '{"type": "object"}')
    page.select_option("#set-thinking", "off")
    page.keyboard.press("Escape")
    assert page.input_value("#question") == "hi", "what was not sent is not lost"
    page.press("#question", "Enter")
    answered(page)
    assert said(sent[0])[0] == ("system", "Be brief.") and sent[0]["top_p"] == 0.5
    assert sent[0]["stop"] == ["END"] and sent[0]["thinking"] == {"type": "disabled"}
    assert sent[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "temperature" not in sent[0], "an empty field is the server's default, not 0"
    page.click("#settings-toggle")
    page.select_option("#set-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    page.click("text=Reset all settings")
    page.keyboard.press("Escape")
    ask(page, "again")
    answered(page)
    assert "stop" not in sent[1] and sent[1]["messages"][0]["role"] == "user"


def test_files_are_attached_by_picking_pasting_and_dropping(page: Any, tmp_path: Path) -> None:  # noqa: F811
    sent = script(page, stream("well"))
    (tmp_path / "notes.txt").write_text("seven words are in this little file")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    page.set_input_files("#file", [tmp_path / "notes.txt", tmp_path / "picture.png"])
    page.wait_for_selector("text=picture.png is not a text file")
    page.wait_for_selector(".file:has-text('notes.txt'):has-text('tokens')")
    page.fill("#question", "word " * 1000)
    for key in "axv":
        page.press("#question", f"Control+{key}")
    page.wait_for_selector(".file:has-text('pasted-1.txt')")
    drop = """() => {
        const data = new DataTransfer();
        data.items.add(new File(["dropped text"], "drop.md"));
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        document.body.dispatchEvent(new DragEvent("drop", options));
    }"""
    page.evaluate(drop)
    page.wait_for_selector(".file:has-text('drop.md')")
    page.click("[aria-label='Remove pasted-1.txt']")
    ask(page, "What is in them?")
    answered(page)
    ((_, content),) = said(sent[0])
    assert content.startswith("File notes.txt:\n\nseven words") and content.endswith("\nWhat is in them?")
    assert "dropped text" in content and "word word" not in content
    assert page.locator(".user .file").count() == 2 and page.locator("#files .file").count() == 0


def test_the_field_keeps_a_draft_and_recalls(page: Any) -> None:  # noqa: F811
    script(page, stream("well"))
    for text in ("one", "two"):
        ask(page, text)
        answered(page)
    page.focus("#question")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#question") == "one"
    page.keyboard.press("ArrowDown")
    assert page.input_value("#question") == "two"
    page.fill("#question", "half a thought")
    page.press("#question", "Shift+Enter")
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert page.input_value("#question") == "half a thought\n"
    page.fill("#question", "")
    empty = page.locator("#question").bounding_box()["height"]
    page.fill("#question", "one long line without an end " * 12)
    assert 2 * empty < page.locator("#question").bounding_box()["height"] < 0.4 * 780 + 1
    page.locator("#talk").focus()
    page.keyboard.press("?")
    assert page.is_visible("#help[open] >> text=stop the answer")


def test_only_readers_at_the_end_are_moved(page: Any) -> None:  # noqa: F811
    script(page, stream("line\n\n" * 80))
    ask(page, "one")
    answered(page)

    def place() -> tuple[float, float]:
        return tuple(page.evaluate(  # type: ignore[return-value]
            "(() => { const t = document.querySelector('#talk'); "
            "return [t.scrollTop, t.scrollHeight - t.scrollTop - t.clientHeight]; })()"
        ))  # fmt: skip

    assert place()[1] < 2, "at the end of what was followed"
    page.mouse.move(700, 300)
    page.mouse.wheel(0, -900)
    wait(lambda: place()[1] > 500, 5)
    page.wait_for_selector("#down:not([hidden])")
    above = place()[0]
    page.locator("#talk").evaluate("(t) => t.querySelector('.content').append('more '.repeat(3000))")
    page.wait_for_timeout(100)
    assert place()[0] == above, "what grows below moves nobody"
    ask(page, "two")
    answered(page)
    assert place()[1] < 2, "a sent question is shown"
    page.mouse.wheel(0, -700)
    page.wait_for_selector("#down:not([hidden])")
    page.click("#down")
    wait(lambda: place()[1] < 2, 5)
    assert not page.is_visible("#down")


def test_a_model_that_loads_and_a_server_that_is_away_are_told(page: Any) -> None:  # noqa: F811
    loading = json.dumps({"ready": False, "phase": "weights", "fraction": 0.5})
    page.route(
        "**/ready", lambda route: route.fulfill(status=503, body=loading, content_type="application/json")
    )
    page.reload()
    page.wait_for_selector("#banner:has-text('The model is loading (weights): 50 %')")
    assert page.locator("#banner progress").evaluate("(bar) => bar.value") == 0.5
    page.unroute("**/ready")
    page.wait_for_selector("#banner", state="hidden")
    page.wait_for_selector(".example")
    page.route("**/health", lambda route: route.abort())
    page.wait_for_selector("#banner:has-text('The server cannot be reached')")
    page.unroute("**/health")
    page.wait_for_selector("#banner", state="hidden")
    page.complaints.clear()  # the browser's own lines on both


def test_progress_is_told(page: Any) -> None:  # noqa: F811
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    ask(page, "hi")
    page.wait_for_selector(".state:has-text('Sent')")
    held[0].fulfill(body=stream("well"), content_type="text/event-stream")
    answered(page)
    bar = """async () => {
        const { Run } = await import("/page/run.js");
        const { AnswerView } = await import("/page/turn-view.js");
        const acts = { isBusy: () => true, isLast: () => true, place: (turn) => [0, [turn]], grown() {} };
        const turn = { id: "a", role: "assistant", content: "" };
        const view = new AnswerView(turn, acts), run = new Run({ save() {} }, turn, {});
        view.follow(run);
        run.phase = "reading";
        run.take({ prompt_progress: { total: 1100, cache: 100, processed: 600, time_ms: 5000 } });
        return [view.state.innerText || view.state.textContent, view.state.querySelector("progress").value];
    }"""
    words, share = page.evaluate(bar)
    assert words == "Reading 1,100 tokens: 54 %, about 5.0 s left" and 0.54 < share < 0.55


@pytest.mark.slow
def test_a_full_server_tells_the_place_in_the_queue(page: Any, server: Server) -> None:  # noqa: F811
    """Three may run: two clients wait before the page, and it moves up as they begin."""
    body = {"model": "tiny", "messages": STORY, "stream": True, "ignore_eos": True, "max_tokens": 900}
    with ExitStack() as stack:
        others = []
        for busy in range(1, 6):
            others.append(connection := stack.enter_context(closing(server.connection())))
            connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
            wait(lambda: server.gauge("dsv4_num_requests_running") == min(busy, 3), 10)  # noqa: B023
            wait(lambda: server.gauge("dsv4_num_requests_waiting") == max(busy - 3, 0), 10)  # noqa: B023
        ask(page, "hi")
        page.wait_for_selector(".state:has-text('Waiting for a free place: 2 requests ahead')")
        others[3].close()
        page.wait_for_selector(".state:has-text('Waiting for a free place: 1 request ahead')")
        others[4].close()
        page.wait_for_selector(".state:has-text('Waiting for a free place: next in the queue')")
        others[0].close()
        answered(page)
    wait(server.is_idle, 10)


def test_a_deleted_conversation_stays_deleted_while_it_is_answered(page: Any, server: Server) -> None:  # noqa: F811
    ask(page, "Tell me a story about a horse.")
    page.wait_for_selector(".thinking:not([hidden])")
    option(page, "Tell me a story about a horse.", "Delete")
    wait(lambda: titles(page) == [], 5)
    wait(server.is_idle, 10)
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector("body.is-ready")
    assert titles(page) == []


def test_another_tab_sees_an_answer_grow(page: Any, server: Server) -> None:  # noqa: F811
    ask(page, "Tell me a long story about a horse.")
    page.wait_for_selector(".content p")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".facts:has-text('being answered in another tab')")
    length = len(other.inner_text(".content"))
    wait(lambda: len(other.inner_text(".content")) > length, 10)
    assert not other.is_visible("text=Continue")
    page.close()
    other.wait_for_selector(".facts:has-text('interrupted')")
    assert other.is_visible("text=Continue")
    wait(server.is_idle, 10)


def test_an_answer_without_anything_is_no_version(page: Any) -> None:  # noqa: F811
    script(page, 'data: {"error": {"message": "no"}}\n\n', stream("well"))
    ask(page, "hi")
    page.click("text=Try again")
    assert answered(page).locator(".content").inner_text() == "well"
    assert page.locator(".branches").count() == 0 and not page.is_visible(".error")
