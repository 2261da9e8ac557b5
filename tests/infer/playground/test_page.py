"""The playground in a headless Chromium: typed, streamed, compared."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="gradio is not installed (the extra playground)")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("no chromium and chromedriver are installed", allow_module_level=True)

FLAGS = (
    "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
)


@pytest.fixture(scope="module")
def address(model_dir: Path) -> Iterator[str]:
    """A running playground of the tiny model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "infer.playground", f"model={model_dir}", f"port={port}", "threads=1"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3], env=os.environ)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator["webdriver.Chrome"]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path}")
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.implicitly_wait(60)
    yield driver
    driver.quit()


def test_a_prompt_is_typed_streamed_and_compared(address: str, browser: "webdriver.Chrome") -> None:
    browser.get(address)
    browser.find_element("css selector", "#prompt textarea").send_keys("def f(x): <b>")
    browser.find_element("css selector", "#continue").click()
    result = browser.find_element("css selector", "#result h3").text
    assert "times plain decoding's speed. The texts are identical." in result
    texts = [browser.find_element("css selector", f"#{name} pre").text for name in ("drafting", "plain")]
    assert texts[0] == texts[1] and texts[0].startswith("def f(x): <b>") and len(texts[0]) > 20
    figures = browser.find_element("css selector", "#plain-figures").text
    assert "128 tokens" in figures and "1.00 tokens per forward" in figures
    errors = [line for line in browser.get_log("browser") if "favicon" not in line["message"]]
    assert not errors, errors
