"""The page at `/` in a real Chromium, against a real server with the embedded model."""

import base64
import json
import os
import shutil
import time

import pytest
from support.served import SCENE, data_url, serving, until, user

from foreglance import Engine, Settings
from foreglance.serve.settings import ServerSettings, digest

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need Playwright's Python package")
expect = sync_api.expect
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
QUESTION = "Describe the image."
DEPTH = 3
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need Chromium (CHROMIUM names its path)")


class SlowEngine:
    """Steps of an engine, each after a pause that a test sets."""

    def __init__(self):
        self.engine = Engine.load("tiny-qwen", Settings(weights="fp32"))
        self.pause = 0.0
        step = self.engine.step

        def slow_step():
            time.sleep(self.pause)
            return step()

        self.engine.step = slow_step


@pytest.fixture(scope="module")
def slow():
    return SlowEngine()


@pytest.fixture(scope="module")
def server(slow):
    with serving(slow.engine) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page, what it asked for and what went wrong in it."""

    def __init__(self, browser, address, **options):
        self.address = address
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.errors.append(line.text))
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.goto(address)

    def ready(self):
        expect(self.page.locator("#model")).to_have_text("tiny-qwen")
        return self

    def ask(self, text=QUESTION, scene=True):
        """Attach the example picture, send, and wait for the answer; returns its element."""
        if scene:
            self.page.set_input_files("#files", SCENE)
            expect(self.page.locator(".thumb")).to_have_count(1)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        return self.answered()

    def answered(self):
        answer = self.page.locator(".answer").last
        expect(answer.locator(".turn-buttons")).to_be_visible()
        return answer

    def choose(self, **settings):
        for name, value in settings.items():
            field = self.page.locator(f"#settings [name={name}]")
            if isinstance(value, bool):
                field.set_checked(value)
            elif field.evaluate("e => e.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(str(value))

    @property
    def sent(self):
        """Bodies of the chat completions that the page has asked for."""
        return [r.post_data_json for r in self.requests if r.url.endswith("/v1/chat/completions")]


@pytest.fixture
def visit(browser, server, slow):
    """Opens pages; whatever a test does, nothing may break inside the page or be fetched from elsewhere."""
    visits = []

    def open_page(address=server.url, **options):
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield open_page
    slow.pause = 0.0
    for one in visits:
        assert all(r.url.startswith((one.address, "data:", "blob:")) for r in one.requests)
        one.context.close()
        assert not one.errors


ABOUT_SCENE = [user(QUESTION, [data_url()])]


def ask_api(server, depth):
    """The same question without a page: the text and the tokens."""
    body = {"messages": ABOUT_SCENE, "temperature": 0, "return_tokens": True, "speculative": {"depth": depth}}
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"], answer["tokens"]


def marks(answer):
    """(text, depth) of every token that shows."""
    return answer.locator(".text .token").evaluate_all("all => all.map(e => [e.textContent, Number(e.dataset.depth)])")


def shown(tokens):
    return [[t["text"].lstrip() if t["depth"] == 1 else t["text"], t["depth"]] for t in tokens if t["text"]]


def test_accepted_drafts_are_marked_with_the_depths_that_the_api_tells(visit, server):
    text, tokens = ask_api(server, DEPTH)
    one = visit().ready()
    one.choose(depth=str(DEPTH))
    answer = one.ask()
    assert answer.locator(".text").text_content() == text
    assert marks(answer) == shown(tokens) and {t["depth"] for t in tokens} == {0, 1, 2, 3}
    styles = answer.locator(".text").evaluate(
        """text => ["0", "1", "2", "3"].map(depth => {
            const style = getComputedStyle(text.querySelector(`[data-depth="${depth}"]`));
            return [style.textDecorationLine, style.textDecorationStyle, style.backgroundColor];
        })"""
    )
    assert styles[0][0] == "none" and all(line == "underline" for line, _, _ in styles[1:])
    assert len({tuple(style) for style in styles}) == 4 and styles[0][2] != styles[1][2]


def test_figures_are_those_of_the_answer(visit):
    """Live figures are counted from the chunks, so in the end they must be what the server says."""
    one = visit().ready()
    one.choose(depth=str(DEPTH))
    streamed = []

    def pass_on(route):
        response = route.fetch()
        streamed.append(response.text())
        route.fulfill(response=response)

    one.page.route("**/v1/chat/completions", pass_on)
    answer = one.ask()
    chunks = [json.loads(line[6:]) for line in streamed[0].splitlines() if line.startswith("data: {")]
    timings = next(chunk["timings"] for chunk in reversed(chunks) if "timings" in chunk)
    page = one.page
    expect(page.locator("#figure-speed")).to_have_text(f"{timings['predicted_per_second']:.1f}")
    expect(page.locator("#figure-step")).to_have_text(f"{timings['tokens_per_step']:.2f}")
    rows = page.locator("#depths tbody tr")
    expect(rows).to_have_count(DEPTH)
    for i, (stood, tried) in enumerate(zip(timings["accepted_by_depth"], timings["drafted_by_depth"], strict=True)):
        expect(rows.nth(i).locator(".counts")).to_have_text(f"{stood} of {tried}")
    expect(answer.locator(".facts")).to_contain_text(f"{timings['predicted_n']} tokens")


def test_figures_move_while_the_answer_comes(visit, slow):
    one = visit().ready()
    slow.pause = 0.1
    one.choose(depth=str(DEPTH))
    one.page.set_input_files("#files", SCENE)
    one.page.fill("#prompt", QUESTION)
    one.page.press("#prompt", "Enter")
    expect(one.page.locator("#depths tbody tr").first).to_be_visible()
    expect(one.page.locator(".answer")).to_have_attribute("aria-busy", "true")
    expect(one.page.locator("#figure-speed")).not_to_have_text("–")
    expect(one.page.locator("#figure-step")).not_to_have_text("–")
    slow.pause = 0.0
    one.answered()


def test_without_drafts_nothing_is_marked_and_the_text_is_the_same(visit):
    one = visit().ready()
    one.choose(depth=str(DEPTH))
    drafted = one.ask()
    text = drafted.locator(".text").text_content()
    one.page.click("#new")
    one.choose(drafts=False)
    plain = one.ask()
    assert plain.locator(".text").text_content() == text
    assert {depth for _, depth in marks(plain)} == {0}
    assert one.sent[-1]["speculative"] == {"depth": 0}
    expect(one.page.locator("#meter-note")).to_contain_text("Drafts were off")


def test_an_answer_can_be_compared_with_drafts_off(visit):
    one = visit().ready()
    one.choose(depth=str(DEPTH))
    answer = one.ask()
    answer.locator(".compare").click()
    tokens = one.page.locator(".facts").text_content().split(" ")[0]
    expect(answer.locator(".verdict")).to_contain_text(f"the same {tokens} tokens")
    assert one.sent[-1] == one.sent[0] | {"speculative": {"depth": 0}}


def test_settings_go_with_the_request_and_outlive_a_reload(visit):
    one = visit().ready()
    one.choose(images="skip", depth="2", draft="mtp", temperature=0.8, max_tokens=5, seed=11, system="Be brief.")
    one.page.reload()
    one.ready().ask()
    (sent,) = one.sent
    assert sent["speculative"] == {"draft": "mtp", "depth": 2, "images": "skip"}
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.8, 5, 11)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    expect(one.page.locator(".facts")).to_contain_text("Cut at the token limit · 5 tokens")


def test_stop_ends_the_answer_here_and_there(visit, slow):
    one = visit().ready()
    slow.pause = 0.15
    one.choose(drafts=False)
    one.page.fill("#prompt", "Hello, who are you?")
    one.page.press("#prompt", "Enter")
    expect(one.page.locator(".answer .token").nth(2)).to_be_visible()
    one.page.get_by_role("button", name="Stop").click()
    expect(one.page.locator(".facts")).to_contain_text("Stopped")
    expect(one.page.get_by_role("button", name="Send")).to_be_visible()
    until(lambda: slow.engine.num_running == 0, "the engine has ended it")
    slow.pause = 0.0
    partial = one.page.locator(".text").text_content()
    one.ask("And what can you see?", scene=False)
    assert [m["role"] for m in one.sent[-1]["messages"]] == ["user", "assistant", "user"]
    assert one.sent[-1]["messages"][1]["content"] == partial != ""


def test_the_keyboard_is_enough(visit, slow):
    one = visit().ready()
    page = one.page
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Hello!")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("How are you?")
    page.keyboard.press("Enter")
    answer = one.answered()
    assert one.sent[0]["messages"][0]["content"][0]["text"] == "Hello!\nHow are you?"
    expect(page.locator("#prompt")).to_be_focused()
    answer.locator(".text").focus()
    page.keyboard.press("End")
    expect(page.locator("#tip")).to_contain_text("token")
    page.keyboard.press("Home")
    expect(page.locator("#tip")).to_contain_text("the model’s own pick · from the prompt")
    expect(page.locator("#status")).to_contain_text("the model’s own pick · from the prompt")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    slow.pause = 0.15
    page.locator("#prompt").focus()
    page.keyboard.type("Tell me more.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer").last.locator(".token").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".facts").last).to_contain_text("Stopped")


def test_hovering_tells_the_depth(visit):
    one = visit().ready()
    one.choose(depth=str(DEPTH))
    answer = one.ask()
    answer.locator('.token[data-depth="2"]').first.hover()
    expect(one.page.locator("#tip")).to_contain_text("accepted draft, depth 2 · step")
    one.page.locator("#prompt").hover()
    expect(one.page.locator("#tip")).to_be_hidden()


def test_pictures_come_by_drop_and_paste_and_can_be_removed(visit):
    one = visit().ready()
    page = one.page
    give = """(name, {bytes, type}) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, { type: "image/png" }));
        const init = { bubbles: true, cancelable: true };
        if (type === "drop") document.body.dispatchEvent(new DragEvent("drop", { ...init, dataTransfer: transfer }));
        else document.getElementById("prompt").dispatchEvent(
            new ClipboardEvent("paste", { ...init, clipboardData: transfer }));
    }"""
    data = base64.b64encode(SCENE.read_bytes()).decode()
    for name, kind in (("dropped.png", "drop"), ("pasted.png", "paste")):
        page.evaluate(f"([name, rest]) => ({give})(name, rest)", [name, {"bytes": data, "type": kind}])
        expect(page.get_by_role("img", name=name)).to_be_visible()
    page.get_by_role("button", name="Remove dropped.png").click()
    expect(page.get_by_role("button", name="Remove pasted.png")).to_be_focused()
    page.get_by_role("button", name="Remove pasted.png").press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".thumb")).to_have_count(0)
    page.set_input_files("#files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    expect(page.locator("#notice")).to_have_text("notes.txt is not a picture.")
    page.set_input_files("#files", {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"})
    expect(page.locator("#notice")).to_contain_text("broken.png is not a picture")
    expect(page.locator(".thumb")).to_have_count(0)


def stream_of(*chunks):
    """What the server would stream: (delta, texts of the tokens of a step) each."""
    lines = [
        {
            "choices": [{"index": 0, "delta": delta}],
            "tokens": [{"id": 1, "text": text, "depth": depth} for depth, text in enumerate(texts)],
            "drafted": len(texts),
        }
        for delta, texts in chunks
    ]
    lines.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def test_reasoning_is_shown_apart_and_nothing_twice(visit):
    one = visit().ready()
    stream = stream_of(
        ({"reasoning_content": "Let me"}, ["<think>", "\nLet", " me"]),
        ({"reasoning_content": " see", "content": "Yes,"}, [" see", "</think>", "\n\nYes", ","]),
        ({"content": " held back and done"}, [" done"]),
    )
    one.page.route("**/v1/chat/completions", stream)
    answer = one.ask("Are there shapes?", scene=False)
    expect(answer.locator(".reasoning p")).to_have_text("Let me see")
    assert answer.locator(".text").text_content() == "Yes, held back and done"
    assert [text for text, _ in marks(answer)] == ["Yes", ",", " done"]
    answer.locator(".reasoning summary").click()
    answer.locator(".reasoning .token").last.hover()
    one.page.route("**/v1/chat/completions", stream)
    one.ask("And now?", scene=False)
    assert one.sent[-1]["messages"][1] == {"role": "assistant", "content": "Yes, held back and done"}


def test_markup_in_messages_names_and_answers_stays_text(visit):
    one = visit().ready()
    page = one.page
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    page.route("**/v1/chat/completions", stream_of(({"content": evil}, [evil])))
    page.set_input_files("#files", {"name": f"{evil}.png", "mimeType": "image/png", "buffer": SCENE.read_bytes()})
    expect(page.locator(".thumb")).to_have_count(1)
    page.fill("#prompt", evil)
    page.press("#prompt", "Enter")
    answer = one.answered()
    assert page.locator(".said").text_content() == answer.locator(".text").text_content() == evil
    assert page.locator(".turn script").count() == 0 and page.locator(".turn img").count() == 1
    assert page.title() == "foreglance"


def test_a_refusal_is_said_and_the_conversation_goes_on(visit):
    one = visit().ready()
    first = one.ask("Hello!", scene=False)
    expect(first.locator(".trouble")).to_be_hidden()
    one.choose(system="word " * 5000)
    refused = one.ask("Are you there?", scene=False)
    expect(refused.locator(".trouble")).to_contain_text("rows")
    expect(one.page.locator(".turn")).to_have_count(4)
    one.choose(system="")
    refused.locator(".again").click()
    again = one.answered()
    expect(again.locator(".trouble")).to_be_hidden()
    expect(again.locator(".text")).not_to_be_empty()
    expect(one.page.locator(".turn")).to_have_count(4)
    assert [m["role"] for m in one.sent[-1]["messages"]] == ["user", "assistant", "user"]
    assert one.errors.pop().endswith("400 (Bad Request)")


def test_a_server_that_is_gone_is_said(visit):
    one = visit().ready()
    one.page.route("**/v1/chat/completions", lambda route: route.abort())
    answer = one.ask("Hello!", scene=False)
    expect(answer.locator(".trouble")).to_have_text("The server cannot be reached. Is it still running?")
    one.page.unroute("**/v1/chat/completions")
    cut = (
        'data: {"choices": [{"index": 0, "delta": {"content": "He"}}], "tokens": [{"id": 1, "text": "He", "depth": 0}]}'
    )
    one.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut + "\n\n")
    )
    answer.locator(".again").click()
    answer = one.answered()
    expect(answer.locator(".trouble")).to_have_text("The connection ended before the answer did.")
    expect(answer.locator(".text")).to_have_text("He")
    assert one.errors.pop().endswith("net::ERR_FAILED")


def test_a_key_is_asked_for_and_kept_in_this_tab_alone(visit):
    settings = ServerSettings(api_keys=(digest("open sesame"),))
    with serving(Engine.load("tiny-qwen", Settings(weights="fp32")), settings) as running:
        one = visit(running.url)
        page = one.page
        expect(page.get_by_role("dialog", name="API key")).to_be_visible()
        page.get_by_label("Key", exact=True).fill("open sesame")
        page.keyboard.press("Enter")
        one.ready().ask("Hello!", scene=False)
        assert page.evaluate("JSON.stringify(sessionStorage)") == '{"foreglance.key":"open sesame"}'
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert one.errors.pop().endswith("401 (Unauthorized)")


def test_the_rows_of_the_conversation_are_drawn(visit, server):
    one = visit().ready()
    page = one.page
    page.locator("#rows summary").click()
    expect(page.locator("#rows-note")).to_contain_text("Nothing yet")
    one.ask()
    image = page.locator("#rows-image")
    expect(image).to_be_visible()
    assert image.evaluate("async image => { await image.decode(); return image.naturalWidth }") > 500
    with server.http() as client:
        explained = client.post("/explain", json={"messages": ABOUT_SCENE}).json()
    rows = page.locator("#rows-table tbody tr")
    expect(rows).to_have_count(len(explained["tracks"]))
    for i, track in enumerate(explained["tracks"]):
        expect(rows.nth(i).locator("td").first).to_have_text(str(track["rows"]))
    assert image.get_attribute("alt").startswith(f"{explained['rows']} rows, 1 image;")


def test_the_page_can_be_read_aloud(visit):
    one = visit().ready()
    answer = one.ask("Hello!", scene=False)
    text = answer.locator(".text").text_content()
    expect(one.page.locator("body")).to_match_aria_snapshot(
        """
        - link "Skip to the message box"
        - banner:
          - heading "foreglance" [level=1]
          - button "New chat"
          - button "Dark theme"
        - main:
          - region "Conversation":
            - article:
              - heading "You" [level=3]
              - paragraph: Hello!
            - article:
              - heading "Answer" [level=3]
              - group "Answer. The arrow keys go through its tokens."
              - paragraph:
                - button "Try again"
          - form "Your message":
            - button "Attach pictures"
            - textbox "Message"
            - button "Send"
        - complementary "Drafting and settings":
          - region "Drafting":
            - heading "Drafting" [level=2]
          - form "Settings":
            - group "Drafts":
              - switch "Draft ahead" [checked]
              - combobox "Depth"
              - combobox "For an image"
            - group "Text":
              - spinbutton "Temperature"
        """
    )
    *read, facts = one.page.locator("#log p").all_text_contents()
    assert " ".join(read) == " ".join(text.split()) and "tokens/s" in facts


CONTRAST = """() => {
    const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const paint = colors => {
        canvas.clearRect(0, 0, 1, 1);
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data.slice(0, 3);
        return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    };
    const layers = e => e ? [...layers(e.parentElement), getComputedStyle(e).backgroundColor] : [];
    const all = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest(".unseen, template, script")) continue;
        const ground = layers(e), [a, b] = [paint(ground), paint([...ground, getComputedStyle(e).color])];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        all.push([ratio, e.className || e.tagName, walker.currentNode.data]);
    }
    return all;
}"""


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_text_has_contrast_in_both_themes(visit, scheme):
    one = visit(color_scheme=scheme).ready()
    one.choose(depth=str(DEPTH))
    one.ask("Hello!", scene=False)
    one.page.locator("#send").click()  # nothing to send: a notice
    expect(one.page.locator("#notice")).not_to_be_empty()
    measured = one.page.evaluate(CONTRAST)
    assert len(measured) > 40
    assert [text for text in measured if text[0] < 4.5] == []


def test_the_theme_follows_the_system_until_one_is_chosen(visit):
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark, light = visit(color_scheme="dark").ready(), visit(color_scheme="light").ready()
    colors = [one.page.evaluate(ground) for one in (dark, light)]
    assert colors[0] != colors[1]
    light.page.get_by_role("button", name="Dark theme").click()
    assert light.page.evaluate(ground) == colors[0]
    expect(light.page.get_by_role("button", name="Dark theme")).to_have_attribute("aria-pressed", "true")
    light.page.reload()
    assert light.page.evaluate(ground) == colors[0]


def test_a_phone_has_all_of_it(visit):
    one = visit(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True).ready()
    page = one.page
    expect(page.locator("#panel")).to_be_hidden()
    page.get_by_role("button", name="Settings").tap()
    expect(page.get_by_role("button", name="Close settings")).to_be_focused()
    one.choose(depth=str(DEPTH))
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    answer = one.ask()
    answer.locator('.token[data-depth="1"]').first.tap()
    expect(page.locator("#tip")).to_contain_text("accepted draft, depth 1")
    page.locator("#rows summary").tap()
    expect(page.locator("#rows-image")).to_be_visible()
    size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert page.evaluate(size) == [360, 740]
