"""The page in a real browser: no console errors, sorting, theme, hiding arms, tooltips, a phone's width, hostile text.

The page stands in a frame of a given width; a script of the test beside it clicks, points and reads.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from shaketable.report import study_html
from shaketable.study.analysis.results import Findings
from tests.report.findings_sample import SAMPLES, study

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--window-size=1600,1000",
)
OUTER = """<!doctype html><pre id="result"></pre><iframe width="1300" height="900" srcdoc="{page}"></iframe><script>
onload = () => {{
  const frame = document.querySelector("iframe"), win = frame.contentWindow, doc = win.document;
  const all = q => [...doc.querySelectorAll(q)], one = q => doc.querySelector(q), click = q => one(q).click();
  const point = (q, x = 0.5) => {{
    one(q).scrollIntoView({{block: "center"}});
    const box = one(q).getBoundingClientRect(), left = box.left + x * box.width, top = box.top + box.height / 2;
    const event = new win.PointerEvent("pointermove", {{bubbles: true, clientX: left, clientY: top}});
    doc.elementFromPoint(left, top).dispatchEvent(event);
    return one(".tip").hidden ? null : one(".tip").textContent;
  }};
  const found = (() => {{ {script} }})();
  document.getElementById("result").textContent = JSON.stringify({{found, errors: win.errors}});
}};
</script>"""
ERRORS = '<script>window.errors = []; addEventListener("error", e => errors.push(e.message))</script>'


@pytest.fixture
def browse(tmp_path):
    """What a script returns beside a page; an error in the page fails."""

    def read(found, script, *flags):
        page = study_html.page(Findings.model_validate(found)).replace("<head>", f"<head>{ERRORS}", 1)
        file = tmp_path / "outer.html"
        file.write_text(OUTER.format(page=html.escape(page), script=script))
        command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        told = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', dumped, re.DOTALL)[1]))
        assert told["errors"] == []
        return told["found"]

    return read


@pytest.mark.parametrize("name", ["study", "partial", "bare", "large"])
def test_nothing_overflows_and_no_script_fails(browse, name):
    widths = browse(
        SAMPLES[name](),
        """
        return [375, 900, 1440].map(width => {
          frame.width = width;
          const out = e => !e.closest(".scroll, svg") && !e.matches(".sr") && e.getBoundingClientRect().right > width + 1;
          return [width, doc.documentElement.scrollWidth, all("main *").filter(out).map(e => e.outerHTML.slice(0, 120))];
        })""",
    )
    assert all(whole <= width and out == [] for width, whole, out in widths), widths


def test_clicking_a_column_head_sorts_both_ways(browse):
    before, down, how, up, names, marked = browse(
        study(),
        """
        const column = () => all(".scores tbody tr").map(r => Number(r.children[2].dataset.v)), head = ".scores th:nth-child(3)";
        const seen = [column()];
        click(head + " button"); seen.push(column(), one(head).getAttribute("aria-sort"));
        click(head + " button"); seen.push(column());
        click(".scores th:nth-child(1) button");
        return [...seen, all(".scores tbody th").map(e => e.textContent.trim()), all(".scores th[aria-sort]").length]""",
    )
    assert down == sorted(before, reverse=True) != before and how == "descending"
    assert up == sorted(before) and names == sorted(names) and marked == 1


@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)])
def test_theme_follows_the_system_until_the_button_is_pressed(browse, flags):
    colour = "win.getComputedStyle(doc.body).backgroundColor"
    script = f"const seen = [{colour}]; for (const n of [1, 2]) {{ click('.theme'); seen.push({colour}) }} return seen"
    light, night = "rgb(246, 246, 243)", "rgb(17, 20, 23)"
    assert browse(study(), script, *flags) == ([night, light, night] if flags else [light, night, light])


def test_an_arm_can_be_hidden_in_every_figure_and_comes_back(browse):
    before, hidden, pressed, after = browse(
        study(),
        """
        const shown = () => [0, 1].map(n => all(`.plot [data-arm="${n}"]`).filter(e => e.getClientRects().length).length);
        const button = '#curves .legend [data-toggle="1"]', seen = [shown()];
        click(button); seen.push(shown(), one(button).getAttribute("aria-pressed"));
        click(button); return [...seen, shown()]""",
    )
    assert before == after and before[1] >= 7 and hidden == [before[0], 0] and pressed == "false"


def test_pointing_and_arrow_keys_tell_the_numbers(browse):
    curve, row, seeds, nothing, keyed = browse(
        study(),
        """
        const seen = [point("#curves .plot .hit rect"), point("#diagnosis .row", 3.5 / 8), point("#scores .seeds"), point("h1")];
        const press = () => one("#curves figure").dispatchEvent(new win.KeyboardEvent("keydown", {key: "ArrowRight"}));
        press(); press(); return [...seen, one(".tip").textContent]""",
    )
    assert curve.startswith("step 1\nclean: ") and "layer 3: " in row and seeds.startswith("seed 0: ")
    assert nothing is None and keyed.startswith("step 2\n")


@pytest.mark.attack("hostile inputs")
def test_hostile_text_is_not_run(browse):
    evil = "<script>window.pwned=1</script></style></script><img src=x onerror=window.pwned=1>\u202e{{ 7 * 7 }}"
    found = study()
    found["study"]["name"] = found["verdict"]["headline"] = found["verdict"]["sentence"] = evil
    for arm in found["arms"]:
        arm |= {"name": arm["name"] + evil, "description": evil}
        arm["samples"][0] |= {"question": evil, "text": evil, "answer": evil}
    found["runs"][0] |= {"folder": "javascript:window.pwned=1", "name": evil}
    tip, pwned, images, links, text = browse(
        found,
        """return [point("#curves .plot .hit rect"), typeof win.pwned, doc.images.length,
            all("a").filter(a => a.protocol === "javascript:").length, one("#samples pre").textContent]""",
    )
    assert "<script>window.pwned=1</script>" in tip and (pwned, images, links) == ("undefined", 0, 0)
    assert evil.replace("\u202e", "⟨U+202E⟩") in text
