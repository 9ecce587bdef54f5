"""The page for everybody: small screens, both themes' contrast, the keyboard, and hostile Markdown."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Server
from page_tab import DESK, PHONE

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

LONG = "wheat" * 60 + "\n\n```python\n" + "x = " + "1 + " * 60 + "1\n```\n\n| a | b |\n\n- " + "stone " * 30

# The ratio of each visible text to what is painted behind it, lowest first: [ratio, text, wanted].
CONTRAST = """() => {
  const parse = (colour) => { const p = colour.match(/[\\d.]+/g).map(Number); return [p[0], p[1], p[2], p[3] ?? 1]; };
  const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    throw new Error("nothing is behind the text");
  };
  const found = [];
  const see = (element, style, text) => {
    const [a, b] = [light(parse(style.color)), light(behind(element))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    found.push([(a + 0.05) / (b + 0.05), text.trim().slice(0, 40), large ? 3 : 4.5]);
  };
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(".unseen, .skip")) continue;
    const own = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("");
    if (own.trim()) see(element, getComputedStyle(element), own);
    if (element.placeholder) see(element, getComputedStyle(element, "::placeholder"), element.placeholder);
    if (element.value && element.matches("input, textarea")) see(element, getComputedStyle(element), element.value);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out_in_both_themes(open_tab: Any, theme: str) -> None:
    tab = open_tab(color_scheme=theme)
    tab.ask("pick", choice=["**bold** and `code`\n\n> quoted\n\n1. item"])
    tab.page.click("#probabilities")
    tab.ask("hello", max_tokens=60, ignore_eos=True)
    tab.ask("hello", top_p=7)
    tab.complaints.clear()  # of the refused one
    seen = 0
    for view in ("#to-chat", "#to-live"):
        tab.page.click(view)
        tab.page.wait_for_timeout(600)
        tab.page.mouse.move(640, 5)
        rows = tab.page.evaluate(CONTRAST)
        seen += len(rows)
        assert [row for row in rows if row[0] < row[2]] == []
    assert seen > 60


def test_the_theme_follows_the_system_until_it_is_chosen(open_tab: Any) -> None:
    page = open_tab(color_scheme="dark").page
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert dark != light
    page.get_by_role("button", name="Use dark colours").click()
    assert page.evaluate(paper) == dark
    page.reload()
    assert page.evaluate(paper) == dark  # it is remembered
    page.get_by_role("button", name="Use light colours").click()
    assert page.evaluate(paper) == light


def test_nothing_overflows_a_phone(open_tab: Any) -> None:
    tab = open_tab(viewport=PHONE, is_mobile=True, has_touch=True)
    page = tab.page
    width = "[document.scrollingElement.scrollWidth, visualViewport.width]"
    tab.ask("wheat" * 100, choice=[LONG])
    assert page.evaluate(width) == [375, 375]
    page.tap("#probabilities")
    tab.ask("pick", choice=[LONG[:400]])
    assert page.evaluate(width) == [375, 375]
    page.tap("#show-settings")
    expect(page.locator("#system")).to_be_visible()
    assert page.evaluate(width) == [375, 375]
    page.tap("#hide-settings")
    running = tab.say("go on", ignore_eos=True, max_tokens=1900)
    page.tap("#to-live")
    expect(page.locator("#rows tr")).not_to_have_count(0)
    assert page.evaluate(width) == [375, 375]
    page.tap("#to-chat")
    page.tap("#stop")
    expect(running.locator(".meta")).to_contain_text("stopped")


def test_everything_works_by_keyboard_alone(open_tab: Any) -> None:
    tab = open_tab(viewport=DESK)
    page, press = tab.page, tab.page.keyboard.press
    start = "document.querySelector('.skip').focus()"
    focus = """() => { const e = document.activeElement, s = getComputedStyle(e);
      return [e.id || e.textContent.trim(), s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1] }"""
    page.evaluate(start)
    press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    tab.more = {"choice": ["mill"]}
    page.keyboard.type("one")
    press("Shift+Enter")
    page.keyboard.type("two")
    press("Enter")
    expect(page.locator(".answer .text")).to_have_text("mill")
    assert tab.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    page.evaluate(start)
    stops = [page.evaluate(focus)]
    for _ in range(40):
        press("Tab")
        stops.append(page.evaluate(focus))
        if stops[-1][0] == "repetition_penalty":
            break
    assert [name for name, seen in stops if not seen] == []  # every stop shows that it has the focus
    names = [name for name, _ in stops]
    wanted = ["Skip to the prompt", "to-chat", "to-live", "theme", "Copy", "Regenerate", "prompt", "new"]
    assert names[: len(wanted)] == wanted
    assert {"probabilities", "show-settings", "send", "system", "temperature", "seed"} <= set(names)
    page.locator("#to-live").focus()
    press("Enter")
    expect(page.locator("#live-view")).to_be_visible()


def test_the_answer_is_read_out_in_sentences(open_tab: Any) -> None:
    tab = open_tab()
    tab.page.evaluate("""() => { window.heard = []; new MutationObserver(() =>
      heard.push(document.getElementById("announce").textContent)).observe(
      document.getElementById("announce"), { childList: true, characterData: true, subtree: true }) }""")
    tab.ask("pick", choice=["The mill turns. The stone grinds. Done"])
    assert "".join(tab.page.evaluate("heard")) == "The mill turns. The stone grinds. Done"
    assert tab.page.locator("#announce").get_attribute("aria-live") == "polite"


FUZZ = """async (seed) => {
  const { markdown } = await import("/page/markdown.js");
  const parts = ["<", ">", "<img src=x onerror=boom()>", "<script>boom()</script>", "javascript:boom()", "[", "](",
    ")", "!", "https://a.b/c", "[x](https://a.b)", "[x](javascript:boom)", "[x](data:text/html,boom)", "**", "*",
    "_", "~~", "`", "```", "\\n", "\\n\\n", "- ", "1. ", "9999999999. ", "> ", "# ", "  ", "\\t", "a", "mill", "&lt;",
    "\\u0000", "\\u202e", '"', "'", " style=x ", "onclick=", "---", "\\r\\n", "🌾", "\\ud800"];
  const tags = new Set("P H3 H4 H5 H6 UL OL LI BLOCKQUOTE HR PRE CODE STRONG EM S A".split(" "));
  const names = new Set(["href", "target", "rel", "start", "data-language"]);
  const next = () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;
  let elements = 0;
  for (let round = 0; round < 1500; round += 1) {
    let text = "";
    for (let left = 1 + next() * 40; left > 0; left -= 1) text += parts[Math.floor(next() * parts.length)];
    const made = markdown(text);
    document.getElementById("log").replaceChildren(made.cloneNode(true));
    for (const element of made.querySelectorAll("*")) {
      elements += 1;
      if (!tags.has(element.tagName)) return `made ${element.tagName} of ${JSON.stringify(text)}`;
      for (const { name, value } of element.attributes) {
        if (!names.has(name)) return `attribute ${name} of ${JSON.stringify(text)}`;
        if (name === "href" && !/^https?:/.test(value)) return `links to ${value}`;
      }
    }
    const letters = (one) => (one.match(/mill|img|script|boom/g) ?? []).length;
    if (letters(made.textContent) > letters(text)) return `invented something for ${JSON.stringify(text)}`;
  }
  return elements;
}"""


def test_no_markdown_makes_more_than_a_few_harmless_elements(open_tab: Any) -> None:
    page = open_tab().page
    for seed in (1, 7, 1234):
        found = page.evaluate(FUZZ, seed)
        assert isinstance(found, int) and found > 2000, found


HARD = ["*", "`", "``a", "[", "[a](", "> ", "- a\n", "**a", "_a ", "~~a", "1. ", "  - a\n", "# ", "```\n", "*a`b[c"]
HARD += ["```a``", "**a*", "__a_", "![", "a\n\n", "-\n ", "1. - > "]


def test_no_markdown_takes_long(open_tab: Any) -> None:
    took = open_tab().page.evaluate(
        """async (texts) => { const { markdown } = await import("/page/markdown.js");
        return texts.map((text) => { const start = performance.now(); markdown(text);
          return [performance.now() - start, text.slice(0, 10)] }) }""",
        [(text * 20_000)[:20_000] for text in HARD],
    )
    assert [one for one in took if one[0] > 1000] == []


def test_the_page_paints_without_waiting(open_tab: Any, server: Server) -> None:
    page = open_tab().page
    sizes = page.evaluate("performance.getEntriesByType('resource').map(e => e.decodedBodySize)")
    assert sum(sizes) < 100_000
    assert page.evaluate("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")
