"""The report's page: its markup, and what a real browser makes of it."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conf.files import with_checksum
from infer.report.write import write
from tests.infer.report import report_fixture as fixture

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """A page whose tags are all closed, in order; its text, its addresses and its headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.text = list[str](), ""
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: list[str | None] = []

    @classmethod
    def read(cls, path: Path) -> "Page":
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
        assert not page.open, page.open
        page.text = " ".join(" ".join(page.texts).split())
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        assert len(result) == len(attrs), attrs
        self.addresses += [result[name] or "" for name in ("src", "href", "xlink:href") if name in result]
        self.images += [result] if tag == "svg" and "role" in result else []
        self.ids += [result["id"]] if "id" in result else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:  # of SVG
            self.handle_starttag(tag, attrs)
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all of its sections."""
    folder = tmp_path_factory.mktemp("report")
    fixture.write_parts(folder, speed=fixture.speed(), quality=fixture.quality())
    (folder / "training.json").write_text(json.dumps(with_checksum(fixture.training())))
    write(folder)
    return folder


def test_the_page_is_one_file_of_sound_markup(folder: Path) -> None:
    source = (folder / "index.html").read_text(encoding="utf-8")
    page = Page.read(folder / "index.html")
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    anchors = {address[1:] for address in page.addresses if address.startswith("#")}
    assert anchors <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert not re.search(r"url\((?!#)|@import|<script", source)
    # A page of settings and commit hashes stood between the headline and the first figure.
    places = [page.ids.index(name) for name in ("speed", "acceptance", "quality", "training", "method")]
    assert places == sorted(places)
    assert len(page.images) > 12 and all(len(image["aria-label"] or "") > 10 for image in page.images)


def test_the_page_says_what_a_reader_asks(folder: Path) -> None:
    text = Page.read(folder / "index.html").text
    for expected in (
        "7b/model with drafts (sdsat) on 3 prompt sets: greedy, ",
        " times as fast as without; sampled at temperature 0.2, ",
        "greedy, bfloat16 (95 %: ",
        "ms of a token, median, humaneval",
        "Texts side by side, bfloat16, greedy",
        "n 400",
        "NVIDIA H200, 1 thread(s) a process, 8 process(es)",
        "max_new_tokens",
        "best exact",
        "≠ plain",
        "least time",
        "4.1 TB/s",
        "Pass@1 in %, MultiPL-E, greedy C++ Java PHP TS C# Bash average",
        "Exact match in %, infilling, greedy Python Java JS average",
        "difference",
        "The sandbox of generated programs: namespaces (no network",
        "MultiPL-E Rs no rustc on this machine",
        "An answer ends before the next line that begins a top-level class",
        "Time of each stage data_prep 8.6 s training 3 min 15 s",
        "the model's own text 134,682 tokens",
        "behind a merged node",
        "HumanEval, HumanEval/0, sdsat, model, passed",
    ):
        assert expected in text, expected
    # Prompts and answers hold markup, and characters that steer a terminal.
    source = (folder / "index.html").read_text(encoding="utf-8")
    assert "␛[2J&lt;script&gt;alert(&#x27;&amp;amp;&#x27;)&lt;/script&gt;" in source
    assert '<span class="shared" title="behind a merged node">numbers[i + 1:]:\n</span>' in source


def test_no_part_of_the_page_needs_the_other(tmp_path: Path) -> None:
    write(fixture.write_parts(tmp_path / "quality", quality=fixture.quality(base=False)))
    text = Page.read(tmp_path / "quality/index.html").text
    assert "Pass@1" in text and "difference" not in text.lower().split("scores of greedy")[0]
    speed = fixture.speed(sets=("humaneval",), temperatures=(0.0,), peers=False)
    write(fixture.write_parts(tmp_path / "speed", speed=speed))
    text = Page.read(tmp_path / "speed/index.html").text
    assert "sandbox" not in text and "Training" not in text


def test_scores_that_tell_nothing_are_no_card(tmp_path: Path) -> None:
    """ "0.0 %" of 5 problems stood in large figures beside the speedups."""
    quality = fixture.quality()
    quality["rows"] = [row for row in quality["rows"] if not row["temperature"]]
    for row in (*quality["rows"], *quality["differences"]):
        row["problems"] = 5
    write(fixture.write_parts(tmp_path, quality=quality))
    source = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'class="card"' not in source
    assert "there are too few problems: these scores cannot tell models apart" in source


def test_texts_that_a_peer_samples_are_no_fault(tmp_path: Path) -> None:
    """ "generate (at worst 0 of 12)" was of sampled texts, and read as if greedy decoding had failed."""
    write(fixture.write_parts(tmp_path, speed=fixture.speed(sets=("humaneval",), dtypes=("float32",))))
    text = Page.read(tmp_path / "index.html").text
    assert "generate (at worst" not in text and "Before you believe" not in text


ASK = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(one =>
    !one.parentElement.closest(".wide, pre") && one.getBoundingClientRect().right > innerWidth + 1);
  const seen = [...document.querySelectorAll("tbody tr")].filter(one => one.checkVisibility()).length;
  const requests = performance.getEntriesByType("resource").filter(one => !one.name.startsWith("data:"));
  const images = [...document.querySelectorAll("figure svg[role]")].filter(one =>
    one.getBoundingClientRect().width < 300).length;
  const paper = getComputedStyle(document.body).backgroundColor;
  parent.document.title = JSON.stringify({scroll: document.documentElement.scrollWidth, wide: wide.length, seen,
    requests: requests.length, images, paper, window: innerWidth});
});</script></body>"""

# A window is no narrower than 500; a frame is.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><title></title>
<iframe width="{width}" height="1000" style="border: 0" srcdoc="{page}"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
@pytest.mark.parametrize(("width", "dark"), [(400, False), (1280, True)])
def test_a_browser_shows_it(folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    """Nothing is wider than the window but what scrolls by itself, nothing is asked of a network, no error."""
    page, source = tmp_path / "page.html", (folder / "index.html").read_text(encoding="utf-8")
    inner = escape(source.replace("</body>", ASK))
    page.write_text(FRAME.format(width=width, page=inner), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] * dark + [page.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (title,) = re.findall("<title>(.*?)</title>", run.stdout)[:1]
    message = json.loads(unescape(title))
    paper = "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    assert message.pop("seen") > 60 and message.pop("scroll") <= width
    assert message == {"wide": 0, "requests": 0, "images": 0, "paper": paper, "window": width}
    assert "CONSOLE" not in run.stderr and "Refused" not in run.stderr
