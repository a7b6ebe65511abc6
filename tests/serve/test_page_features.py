"""What other chat pages have taught people to expect; docs/page.md lists it, with the test of each."""

import re
from pathlib import Path
from typing import Any

from page_support import ANSWERED, answered, ask, browser, page, said, script, stream  # noqa: F401
from serve_support import Server, wait

DOCS = Path(__file__).parents[2] / "docs" / "page.md"


def test_each_of_the_twenty_features_names_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| `(test_\w+)` \|$", DOCS.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    known = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert not [name for _, name in rows if f"def {name}(" not in known]


def test_a_question_in_the_address_is_filled_in_and_not_sent(page: Any, server: Server) -> None:  # noqa: F811
    sent = script(page, stream("well"))
    page.goto(f"http://127.0.0.1:{server.port}/?q=What%20is%20<b>2%20%2B%203</b>%3F")
    page.wait_for_selector(".example")
    assert page.input_value("#question") == "What is <b>2 + 3</b>?" and not sent
    page.press("#question", "Enter")
    answered(page)
    assert said(sent[0]) == [("user", "What is <b>2 + 3</b>?")] and "?q=" not in page.url


def test_pinned_conversations_come_first(page: Any) -> None:  # noqa: F811
    script(page, stream("well"))
    for title in ("first", "second"):
        ask(page, title)
        answered(page)
        page.click("#new")

    def pick(title: str, action: str) -> None:
        page.locator(f"#list li:has-text('{title}')").hover()
        page.click(f"[aria-label='Options for {title}']")
        page.click(f".menu >> text={action}")

    def rows() -> list[str]:
        return page.locator("#list li").all_inner_texts()

    assert rows() == ["Today", "second", "first"]
    pick("first", "Pin")
    wait(lambda: rows() == ["Pinned", "first", "Today", "second"], 5)
    page.reload()
    wait(lambda: rows() == ["Pinned", "first", "Today", "second"], 5)
    pick("first", "Unpin")
    wait(lambda: rows() == ["Today", "second", "first"], 5)


def test_a_message_can_be_deleted_with_what_follows(page: Any) -> None:  # noqa: F811
    sent = script(page, *(stream(f"answer {number}") for number in range(3)))
    for question in ("one", "two"):
        ask(page, question)
        answered(page)

    def texts() -> list[str]:
        return page.locator(".turn .bubble, .turn .content").all_inner_texts()

    page.locator(".user").nth(1).locator("[aria-label='Delete, with what follows']").click()
    assert texts() == ["one", "answer 0"]
    page.click("text=Undo")
    wait(lambda: texts() == ["one", "answer 0", "two", "answer 1"], 5)
    page.locator(".user").nth(1).locator("[aria-label='Delete, with what follows']").click()
    page.reload()
    page.wait_for_selector(ANSWERED)
    assert texts() == ["one", "answer 0"]
    ask(page, "three")
    answered(page)
    assert said(sent[2]) == [("user", "one"), ("assistant", "answer 0"), ("user", "three")]
    page.fill("#search", "answer 1")
    page.wait_for_selector("text=Nothing found")


def test_a_conversation_that_is_answered_elsewhere_keeps_its_new_name(page: Any, server: Server) -> None:  # noqa: F811
    ask(page, "Tell me a long story about a horse.")
    page.wait_for_selector(".thinking:not([hidden])")
    page.click("#new")
    page.locator("#list li:has-text('horse')").hover()
    page.click("[aria-label='Options for Tell me a long story about a horse.']")
    page.click(".menu >> text=Rename")
    page.keyboard.type("Horses")
    page.keyboard.press("Enter")
    wait(lambda: page.locator("#list .open").all_inner_texts() == ["Horses"], 5)
    page.wait_for_timeout(1200)  # it is saved twice a second
    page.reload()
    wait(lambda: page.locator("#list .open").all_inner_texts() == ["Horses"], 5)
    wait(server.is_idle, 10)
