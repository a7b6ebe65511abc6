"""How answers are shown: Markdown, code, formulas, tool calls; and that none can do more than be shown."""

import json
import random
import time
from typing import Any

import pytest
from page_support import answered, ask, browser, is_firefox, page, script, stream  # noqa: F401

MARKDOWN = r"""# Title

Text with **bold**, `code`, a [link](https://example.org/) and $a_1^2$, but $5 and $6.

| Name | Value |
|:-----|------:|
| a | 1 |
| b | 2 |

1. one
   - inner \(x+1\)
2. two

> quoted

```python
def f(x):
    return "s" + 1  # why
```

$$
\frac{a}{b}
$$

---

[later]: https://example.org/later
See [later]. ![picture](https://example.org/p.png) <https://example.org/auto>
"""

BAD = [
    "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=1</script><a href='javascript:1'>x</a>",
    "[x](javascript:window.hacked=1) [x](JaVaScRiPt:1) [x](&#106;avascript:1) [x](java\tscript:1)",
    "[x](data:text/html,<script>window.hacked=1</script>) [x](vbscript:1) [x](file:///etc/passwd)",
    "![x](https://evil.example/pixel.png) ![x](//evil.example/a) ![](data:image/svg+xml,<svg onload=1>)",
    "<javascript:window.hacked=1> <https://ok.example/\"onmouseover=\"window.hacked=1>",
    "[x]: javascript:window.hacked=1\n[x] [y][x] ![x]",
    '[x](https://a.example "t\\" onclick=\\"window.hacked=1")',
    "<iframe src=https://evil.example></iframe><style>@import 'https://evil.example'</style><base href=//e>",
    "<form action=https://evil.example><input name=a><button>go</button></form><svg onload=window.hacked=1>",
    "```\"><img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```",
    "```__proto__\nx\n```\n```constructor\nx\n```\n```extend\nx\n```",
    "```language-html onload=1\n<b onclick=1>\n```",
    r"$\href{javascript:window.hacked=1}{x}$ $\url{javascript:1}$ $\includegraphics{https://evil.example/a}$",
    r"$\class{x}{y} \id{x}{y} \data{a=b}{c} \style{background:url(https://evil.example)}{x}$",
    r"$\def\a{\a\a}\a$ $\def\x#1{\x{#1#1}}\x{y}$ \(\text{<img src=x onerror=window.hacked=1>}\)",
    r"$$\rule{999999em}{999999em}$$ $$\kern-99999em x$$ $$\color{url(https://evil.example)}x$$",
    r"$$\begin{matrix}" + "a&" * 900 + r"\end{matrix}$$",
    "$" + "{" * 900 + "}" * 900 + "$ $" + r"\frac1" * 500 + "$",
    "|" + "a|" * 400 + "\n|" + "-|" * 400 + "\n" + ("|" + "<b>|" * 400 + "\n") * 40,
    "> " * 3000 + "x", "- " * 3000 + "x", "*" * 5000, "_a" * 5000, "[" * 5000, "![" * 4000, "`" * 4999,
    "[a](" * 3000, "**a *b " * 2000, "<" * 6000, "&#x" * 2500, "\\(" * 3000, "$" * 4999, "$a" * 3000,
    "a\n\n" * 3000, "1. a\n" * 2000, "# " * 3000, "~~" * 3000, "http://" * 1000,
    "\u202e\u0000\ufeff\ud800" * 500,
    "{" * 100_000, '{"a": "' + "<script>" * 1000 + '"}', "\n" * 20_000, " " * 50_000 + "x", "\t- \n" * 3000,
]  # fmt: skip


def hostile(number: int) -> list[str]:
    """The tricks above, each alone, then joined and cut at random."""
    dice = random.Random(0)
    texts = [*BAD]
    while len(texts) < number:
        parts = [dice.choice(BAD[:16] if dice.random() < 0.8 else BAD) for _ in range(dice.randint(1, 4))]
        text = dice.choice(["\n", "\n\n", " ", "> ", "- ", "| ", "```\n", "$", ""]).join(parts)
        start = dice.randrange(max(1, len(text) // 3))
        texts.append(text[start : start + dice.randint(20, 30_000)])
    return texts


# Renders each text as a stream does, and tells all that is not allowed in the page, with the slowest time.
CHECK = """async (texts) => {
    const { Rendering } = await import("/page/rendering.js");
    const tags = new Set(("p h3 h4 h5 h6 ul ol li blockquote div table thead tbody tr th td strong em s " +
      "a br hr code pre figure figcaption span button svg use math mrow mi mn mo ms mtext mspace msub msup " +
      "msubsup munder mover munderover mfrac msqrt mroot mtable mtr mtd mpadded mphantom menclose " +
      "mstyle merror")
      .split(" "));
    const wrong = new Set();
    let slowest = 0;
    const box = document.createElement("div");
    box.className = "content";
    document.querySelector("#turns").append(box);
    for (const text of texts) {
        box.replaceChildren();
        const rendering = new Rendering(box, () => box.offsetHeight);
        const began = performance.now();
        for (let at = 0; at < text.length; at += 4001) {
            rendering.source += text.slice(at, at + 4001);
            rendering.render(false);
        }
        rendering.finish();
        slowest = Math.max(slowest, performance.now() - began);
        await new Promise((resolve) => setTimeout(resolve, 0));
        for (const element of box.querySelectorAll("*")) {
            if (!tags.has(element.localName)) wrong.add(`<${element.localName}>`);
            for (const { name, value } of element.attributes) {
                const loads = name === "src" || name === "style" && /url/.test(value);
                const isBad = loads || name.startsWith("on");
                if (isBad) wrong.add(name);
                if (name === "href" && !/^(https?:\\/\\/|mailto:|#i-)/.test(value)) wrong.add(value);
            }
        }
        if (box.scrollWidth > document.body.clientWidth) wrong.add(`wide: ${text}`);
    }
    box.remove();
    return { wrong: [...wrong], slowest, hacked: window.hacked ?? null };
}"""

# Cuts a text in two at every place; what is shown in the end must be what it is at once.
CUTS = """async (text) => {
    const { Rendering, rendered } = await import("/page/rendering.js");
    const box = document.createElement("div");
    document.body.append(box);
    const shown = () => new XMLSerializer().serializeToString(box).replace(/ aria-[a-z]+="[^"]*"/g, "");
    rendered(box, text);
    await new Promise((resolve) => setTimeout(resolve, text.length > 300 ? 500 : 0));
    box.replaceChildren();
    rendered(box, text);
    const whole = shown(), wrong = [];
    for (let at = 0; at <= text.length; at++) {
        box.replaceChildren();
        const rendering = new Rendering(box);
        rendering.source = text.slice(0, at);
        rendering.render(false);
        rendering.source = text;
        rendering.finish();
        if (shown() !== whole) wrong.push(at);
    }
    box.replaceChildren();
    const rendering = new Rendering(box);
    for (const letter of text) {
        rendering.source += letter;
        rendering.render(false);
    }
    rendering.finish();
    if (shown() !== whole) wrong.push("letter by letter");
    box.remove();
    return { wrong, length: text.length };
}"""


def test_markdown_becomes_elements(page: Any) -> None:  # noqa: F811
    script(page, stream(*[MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]))
    ask(page, "show me")
    answer = answered(page).locator(".content")
    answer.locator(".t-keyword").first.wait_for()
    answer.locator("mfrac").wait_for()
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("td").all_inner_texts() == ["a", "1", "b", "2"]
    assert answer.locator("td.right").count() == 2
    assert answer.locator("ol > li ul > li math").count() == 1
    assert answer.locator("math").count() == 3, "and the prices are none"
    assert "$5 and $6" in answer.inner_text()
    assert answer.locator("figcaption").inner_text() == "python"
    assert answer.locator("pre .t-string").inner_text() == '"s"'
    assert answer.locator("img").count() == 0
    links = {link.inner_text(): link.get_attribute("href") for link in answer.locator("a").all()}
    assert links["image: picture"] == "https://example.org/p.png"
    assert links["later"] == "https://example.org/later"
    assert {a.get_attribute("rel") for a in answer.locator("a").all()} == {"noopener noreferrer nofollow"}
    answer.locator("figcaption button").click()
    page.wait_for_selector("#announcer:has-text('Copied')", state="attached")
    page.press("#question", "Control+v")
    assert page.input_value("#question") == MARKDOWN.split("```python\n")[1].split("```")[0]


def test_a_cut_stream_shows_what_a_whole_one_does(page: Any) -> None:  # noqa: F811
    for text in (MARKDOWN, *(bad for bad in BAD if len(bad) < 120)):
        found = page.evaluate(CUTS, text)
        assert not found["wrong"] and found["length"], text


def test_hostile_answers_do_nothing(page: Any) -> None:  # noqa: F811
    texts = hostile(400)
    assert len(texts) == 400
    for at in range(0, len(texts), 50):
        found = page.evaluate(CHECK, texts[at : at + 50])
        assert not found["wrong"] and found["hacked"] is None
        assert found["slowest"] < 5000, "the page stays responsive (on a loaded machine)"
    # Should a line of ours ever forget itself, a browser with Trusted Types refuses.
    if is_firefox(page):
        return
    refused = page.evaluate("(() => { try { document.body.innerHTML = 'x' } catch (e) { return e.name } })()")
    assert refused == "TypeError" and "TrustedHTML" in page.complaints.pop()


def test_ten_megabytes_without_a_space(page: Any) -> None:  # noqa: F811
    script(page, stream(*["x" * 1_000_000] * 10), stream("well"))
    ask(page, "go")
    began = time.monotonic()
    answer = answered(page)
    assert answer.locator(".plain").count() == 500
    ask(page, "and?")
    assert answered(page).locator(".content").inner_text() == "well"
    assert time.monotonic() - began < 30


def test_nothing_of_a_call_is_html_and_its_result_is_sent(page: Any) -> None:  # noqa: F811
    evil = BAD[0]
    call = {"index": 0, "id": evil, "type": "function", "function": {"name": evil, "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": part}} for part in ('{"a": [1', ', 2], "b": "<b>"}')]
    deltas = [{"reasoning_content": evil[:9]}, {"reasoning_content": evil[9:]}, {"content": evil}]
    calls = [{"tool_calls": [one]} for one in (call, *more)]
    sent = script(page, stream(*deltas, *calls, finish="tool_calls"), stream('{"ok": true, "rows": [1, 2]}'))
    ask(page, evil)
    answer = answered(page)
    assert page.locator("main img, main script, main a").count() == 0
    assert page.text_content(".user .bubble") == evil and page.text_content(".thought") == evil
    assert answer.locator(".name").inner_text() == evil and evil in page.text_content(".content")
    shown = answer.locator(".call pre").inner_text()
    assert json.loads(shown) == {"a": [1, 2], "b": "<b>"} and "\n" in shown, "pretty-printed"
    page.fill(".call textarea", "the result")
    page.click("text=Send results")
    structured = answered(page).locator(".content pre")
    assert json.loads(structured.inner_text()) == {"ok": True, "rows": [1, 2]}
    assert structured.inner_text().count("\n") > 3, "pretty-printed"
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "tool"]
    assert sent[1]["messages"][2]["content"] == "the result" and not page.is_visible(".call textarea")


@pytest.mark.parametrize("error", ["the engine <b>died</b>", None])
def test_an_answer_that_fails_keeps_what_came(page: Any, error: str | None) -> None:  # noqa: F811
    broken = stream("half ", "an answer", finish=None, usage=False).removesuffix("data: [DONE]\n\n")
    broken += f"data: {json.dumps({'error': {'message': error}})}\n\n" if error else ""
    sent = script(page, broken, stream(", and the rest"))
    ask(page, "hi")
    page.wait_for_selector(".error:not([hidden])")
    assert page.inner_text(".error span") == (error or "The connection ended before the answer did.")
    assert page.inner_text(".content") == "half an answer"
    page.click("text=Continue")
    assert answered(page).locator(".content").inner_text() == "half an answer, and the rest"
    assert sent[1]["messages"][-1] == {"role": "assistant", "content": "half an answer", "prefix": True}
    assert not page.is_visible(".error")


def test_log_probabilities_are_shown_on_hover(page: Any) -> None:  # noqa: F811
    def entry(token: str, value: float) -> Any:
        tops = [{"token": token, "logprob": value}, {"token": "<b>", "logprob": -3.0}]
        return {"content": [{"token": token, "logprob": value, "bytes": [], "top_logprobs": tops}]}

    parts = [("Sure", -0.01), (" not", -2.0)]
    sent = script(page, stream(*[{"content": text, "logprobs": entry(text, p)} for text, p in parts]))
    page.click("#settings-toggle")
    page.check("#set-logprobs")
    page.keyboard.press("Escape")
    ask(page, "how sure?")
    answer = answered(page)
    assert sent[0]["logprobs"] is True and sent[0]["top_logprobs"] == 5
    answer.locator('button:text("Tokens")').click()
    assert answer.locator(".token").all_inner_texts() == ["Sure", " not"]
    assert "unsure" in answer.locator(".token").nth(1).get_attribute("class")
    answer.locator(".token").nth(1).hover()
    rows = answer.locator(".token-card tr").all_inner_texts()
    assert "13.5 %" in rows[0] and "<b>" in rows[1] and "5.0 %" in rows[1]
    ask(page, "and now?")
    answered(page)
    answer = page.locator(".assistant").first
    assert answer.locator("[aria-pressed=true]").count() == 1, "shown as before"
    answer.locator('button:text("Tokens")').click()
    assert answer.locator(".content p").inner_text() == "Sure not"
