"""Both pages for everybody: axe-core finds nothing in any state, focus is kept, nothing is cut off."""

import json
from typing import Any

import pytest
from page_support import answered, ask, browser, page, script, stream  # noqa: F401
from serve_support import KEY, Server

RICH = """## Title

Text with `code`, a [link](https://example.org/), $x^2$ and a table.

| a | b |
|---|--:|
| 1 | 2 |

> quoted

```python
def f(x): return "s" + 1  # why
```
"""


def findings(tab: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    found = axe.Axe().run(tab).response["violations"]
    return [f"{one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, scheme: str) -> None:  # noqa: F811
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    seen = {"empty": findings(page)}
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    logprobs = {"content": [{"token": "a", "logprob": -0.9, "top_logprobs": [{"token": "b", "logprob": -1}]}]}
    broken = f"data: {json.dumps({'error': {'message': 'it broke'}})}\n\n"
    script(
        page,
        stream({"reasoning_content": "a thought"}, RICH),
        stream("Calling.", {"tool_calls": [call]}, finish="tool_calls"),
        stream({"content": "a", "logprobs": logprobs}),
        broken,
        stream("fixed"),
    )
    ask(page, "show")
    answered(page).locator(".t-keyword").first.wait_for()
    seen["answered"] = findings(page)
    page.click(".assistant summary")
    seen["thought"] = findings(page)
    page.locator(".user [aria-label=Edit]").click()
    seen["edit"] = findings(page)
    page.keyboard.press("Escape")
    ask(page, "weather?")
    answered(page)
    seen["call"] = findings(page)
    page.fill(".call textarea", "rain")
    page.click("text=Send results")
    answered(page)
    page.click("button:text('Tokens')")
    page.hover(".token")
    seen["tokens"] = findings(page)
    ask(page, "break")
    page.wait_for_selector(".error:not([hidden])")
    seen["error"] = findings(page)
    page.locator("[aria-label=Retry]").last.click()
    answered(page)
    seen["versions"] = findings(page)
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"some text"})
    page.wait_for_selector("#files .file")
    seen["file"] = findings(page)
    page.click("#files .file-open")
    seen["file text"] = findings(page)
    page.keyboard.press("Escape")
    for name, way in (("settings", "#settings-toggle"), ("help", "#help-toggle")):
        page.click(way)
        seen[name] = findings(page)
        page.keyboard.press("Escape")
    page.click("[aria-label^='Options for']")
    seen["menu"] = findings(page)
    page.click(".menu >> text=Delete")
    page.wait_for_selector(".toast")
    seen["toast"] = findings(page)
    page.set_viewport_size({"width": 390, "height": 780})
    page.wait_for_selector("body:not(.side-open)")
    page.click("#menu")
    seen["drawer"] = findings(page)
    assert {state: found for state, found in seen.items() if found} == {}


def test_axe_finds_nothing_on_the_status_page(browser: Any, server: Server) -> None:  # noqa: F811
    server.chat()
    for scheme in ("light", "dark"):
        credentials = {"username": "", "password": KEY}
        context = browser.new_context(http_credentials=credentials, color_scheme=scheme)
        tab = context.new_page()
        tab.goto(f"http://127.0.0.1:{server.port}/status")
        tab.wait_for_selector(".card:has-text('Model')")
        assert findings(tab) == []
        context.close()


def test_turns_have_names_and_answers_are_announced(page: Any) -> None:  # noqa: F811
    script(page, stream("One sentence. ", "Another one! ", "And the end"))
    ask(page, "hi")
    answered(page)
    assert page.get_by_role("article", name="You").count() == 1
    assert page.get_by_role("article", name="Assistant").count() == 1
    for landmark in ("main", "complementary", "banner"):
        assert page.get_by_role(landmark).count() == 1, landmark
    said = page.locator("#announcer p").all_inner_texts()
    assert said == [
        "The assistant answers.",
        "One sentence.",
        "Another one!",
        "And the end",
        "The answer is complete.",
    ]


def test_focus_is_never_lost(page: Any) -> None:  # noqa: F811
    script(page, stream("well"))

    def focused() -> str:
        return page.locator(":focus").evaluate("(e) => e.id || e.getAttribute('aria-label')")

    ask(page, "hi")
    answered(page)
    assert focused() == "question"
    page.focus("[aria-label=Retry]")
    page.keyboard.press("Enter")
    answered(page)
    assert focused() == "Assistant", "the new answer, as the button is gone"
    page.focus("[aria-label='Previous version']")
    page.keyboard.press("Enter")
    assert focused() == "Next version"
    page.focus("[aria-label=Edit]")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert focused() == "Edit"
    page.click("#settings-toggle")
    page.keyboard.press("Escape")
    assert focused() == "settings-toggle"


@pytest.mark.parametrize("size", [(390, 844), (844, 390), (320, 480), (640, 400)])
def test_nothing_is_cut_off_on_small_screens(page: Any, size: tuple[int, int]) -> None:  # noqa: F811
    """640 × 400 is a screen of 1280 × 800 at 200 %."""
    width, height = size
    page.set_viewport_size({"width": width, "height": height})
    script(page, stream(RICH, "a" * 2000, "\n\n|" + "wide|" * 60 + "\n|" + "-|" * 60 + "\n"))
    page.wait_for_selector("body:not(.side-open)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ask(page, "q" * 500)
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('#talk').scrollWidth") <= width
    for name in ("#question", "#send", "#menu", "#settings-toggle"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= height, name
