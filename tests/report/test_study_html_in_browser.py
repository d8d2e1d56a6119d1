"""The page in a real browser: no console errors, sorting, theme, hiding arms, tooltips, a phone's width, hostile text.

Chromium is spoken to over its debugging pipe (JSON messages, each ended by a NUL), which needs nothing but the standard
library. Clicks are real mouse events at the place of the element, so a button that lies under something else fails.
"""

import fcntl
import json
import os
import shutil
import subprocess
import threading
from queue import Queue

import pytest

from shaketable.report import study_html
from shaketable.study.analysis.results import Findings
from tests.report.findings_sample import SAMPLES, study

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars")


class Chromium:
    """One browser process; `open` gives a tab."""

    def __init__(self, profile):
        theirs_in, self.out = os.pipe()
        self.back, theirs_out = os.pipe()
        low, high = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out))
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        start = f'exec "$@" 3<&{low} 4>&{high}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, "bash", *command], pass_fds=(low, high), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in (theirs_in, theirs_out, low, high):
            os.close(fd)
        self.sent, self.answers, self.events = 0, Queue(), []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        held = b""
        while chunk := os.read(self.back, 1 << 16):
            *whole, held = (held + chunk).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self.answers.put(message)
                else:
                    self.events.append(message)

    def call(self, method, session=None, **params):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        answer = self.answers.get(timeout=90)
        assert answer["id"] == self.sent and "error" not in answer, answer
        return answer["result"]

    def open(self, path, width=1300, height=900, dark=False):
        return Tab(self, path, width, height, dark)

    def close(self):
        self.call("Browser.close")
        self.process.wait(30)


class Tab:
    def __init__(self, browser, path, width, height, dark):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self("enable", domain)
        self("setDeviceMetricsOverride", "Emulation", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("setEmulatedMedia", "Emulation", features=[scheme])
        self("navigate", "Page", url=path.as_uri())
        self.js("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def __call__(self, method, domain, **params):
        return self.browser.call(f"{domain}.{method}", self.session, **params)

    def js(self, text):
        got = self("evaluate", "Runtime", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def point(self, selector, x=0.5):
        spot = f"(e => {{ e.scrollIntoView({{block: 'center'}}); let b = e.getBoundingClientRect(); return [b.left + b.width * {x}, b.top + b.height / 2]; }})"
        return self.js(f"{spot}(document.querySelector({selector!r}))")

    def mouse(self, kind, x, y):
        self(
            "dispatchMouseEvent", "Input", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1
        )

    def click(self, selector):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *self.point(selector))

    def errors(self):
        own = [e for e in self.browser.events if e.get("sessionId") == self.session]
        loud = [e for e in own if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
        return loud + [e for e in own if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] != "verbose"]

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    names = ("study", "partial", "run", "bare", "large")
    for name in names:
        (folder / f"{name}.html").write_text(study_html.page(Findings.model_validate(SAMPLES[name]())))
    return {name: folder / f"{name}.html" for name in names}


@pytest.mark.parametrize("name", ["study", "partial", "run", "bare", "large"])
@pytest.mark.parametrize("width", [375, 900, 1440])
def test_nothing_overflows_and_the_console_is_silent(browser, files, name, width):
    tab = browser.open(files[name], width=width)
    assert tab.js("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') && !e.matches('.sr')
        && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
    assert tab.js(outside) == []
    assert tab.errors() == []
    tab.close()


def column(tab, n):
    return tab.js(f"[...document.querySelectorAll('.scores tbody tr')].map(r => Number(r.children[{n}].dataset.v))")


def test_clicking_a_column_head_sorts_both_ways(browser, files):
    tab = browser.open(files["study"])
    before = column(tab, 2)
    tab.click(".scores th:nth-child(3) button")
    assert column(tab, 2) == sorted(before, reverse=True) != before
    assert tab.js("document.querySelector('.scores th:nth-child(3)').getAttribute('aria-sort')") == "descending"
    tab.click(".scores th:nth-child(3) button")
    assert column(tab, 2) == sorted(before)
    tab.click(".scores th:nth-child(1) button")
    names = tab.js("[...document.querySelectorAll('.scores tbody th')].map(e => e.textContent.trim())")
    assert names == sorted(names)
    assert tab.js("document.querySelectorAll('.scores th[aria-sort]').length") == 1
    tab.close()


@pytest.mark.parametrize("dark", [False, True])
def test_theme_follows_the_system_until_the_button_is_pressed(browser, files, dark):
    tab = browser.open(files["study"], dark=dark)
    colour = "getComputedStyle(document.body).backgroundColor"
    light, night = "rgb(246, 246, 243)", "rgb(17, 20, 23)"
    assert tab.js(colour) == (night if dark else light)
    tab.click(".theme")
    assert tab.js(colour) == (light if dark else night)
    tab.click(".theme")
    assert tab.js(colour) == (night if dark else light)
    tab("setEmulatedMedia", "Emulation", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.js(colour) == "rgb(255, 255, 255)"
    assert tab.js("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.close()


def test_an_arm_can_be_hidden_in_every_figure_and_comes_back(browser, files):
    tab = browser.open(files["study"])
    shown = "[...document.querySelectorAll('.plot [data-arm=\"1\"]')].filter(e => e.getClientRects().length).length"
    others = "[...document.querySelectorAll('.plot [data-arm=\"0\"]')].filter(e => e.getClientRects().length).length"
    before, rest = tab.js(shown), tab.js(others)
    assert before >= 7
    button = '#curves .legend [data-toggle="1"]'
    tab.click(button)
    assert tab.js(shown) == 0 and tab.js(others) == rest
    assert tab.js(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    tab.click(button)
    assert tab.js(shown) == before
    tab.close()


def test_pointing_and_arrow_keys_tell_the_numbers(browser, files):
    tab = browser.open(files["study"])
    tip = "(e => e.hidden ? null : e.textContent)(document.querySelector('.tip'))"
    assert tab.js(tip) is None
    tab.mouse("mouseMoved", *tab.point("#curves .plot .hit rect"))
    assert tab.js(tip).startswith("step 1\nclean: ")
    tab.mouse("mouseMoved", *tab.point("#diagnosis .row", x=3.5 / 8))
    assert "layer 3: " in tab.js(tip)
    tab.mouse("mouseMoved", *tab.point("#scores .seeds"))
    assert tab.js(tip).startswith("seed 0: ")
    tab.mouse("mouseMoved", *tab.point("h1"))
    assert tab.js(tip) is None
    tab.js("document.querySelector('#curves figure').focus()")
    for _ in range(2):
        tab("dispatchKeyEvent", "Input", type="keyDown", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert tab.js(tip).startswith("step 2\n")
    tab.close()


@pytest.mark.attack("hostile inputs")
def test_hostile_text_is_not_run(browser, tmp_path):
    evil = "<script>window.pwned=1</script></style></script><img src=x onerror=window.pwned=1>\u202e{{ 7 * 7 }}"
    found = study()
    found["study"]["name"] = found["verdict"]["headline"] = found["verdict"]["sentence"] = evil
    for arm in found["arms"]:
        arm |= {"name": arm["name"] + evil, "description": evil}
        arm["samples"][0] |= {"question": evil, "text": evil, "answer": evil}
    found["runs"][0] |= {"folder": "javascript:window.pwned=1", "name": evil}
    path = tmp_path / "evil.html"
    path.write_text(study_html.page(Findings.model_validate(found)))
    tab = browser.open(path)
    tab.mouse("mouseMoved", *tab.point("#curves .plot .hit rect"))
    assert "<script>window.pwned=1</script>" in tab.js("document.querySelector('.tip').textContent")
    assert tab.js("[typeof window.pwned, document.images.length, document.scripts.length]") == ["undefined", 0, 1]
    assert tab.js("[...document.querySelectorAll('a')].filter(a => a.protocol === 'javascript:').length") == 0
    assert evil.replace("\u202e", "⟨U+202E⟩") in tab.js("document.querySelector('#samples pre').textContent")
    assert tab.errors() == []
    tab.close()
