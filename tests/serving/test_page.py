"""The page at /, in a browser: an answer comes piece by piece, its drafts are marked."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from compilespec.serving import ServerOptions
from compilespec.serving.app import PAGE
from tests.support import browser
from tests.support.browser import Browser, open_browser
from tests.support.live_server import live, toy_engine

SAYS = "Zwölf Boxkämpfer <b>jagen</b> Viktor."


def ask(window: Browser, text: str) -> None:
    window.run(f"at('prompt').value = {text!r}; at('ask').requestSubmit()")
    until = time.monotonic() + 30
    while window.run("return running !== null"):
        assert time.monotonic() < until
        time.sleep(0.1)


def turns(window: Browser) -> Any:
    return window.run("return [...document.querySelectorAll('.turn')].map(t => t.textContent)")


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    with live(toy_engine("x")) as server, server.client() as client:
        answer = client.get("/")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "//" not in answer.text.replace("</", "")


def test_its_script_without_a_browser() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    stub = Path(browser.__file__).with_name("page_stub.js")
    options = ServerOptions(model_names=("toy",), api_keys=("k",))
    with live(toy_engine(SAYS, hit_rate=0.7), options) as server:
        command = [node, str(stub), str(PAGE), server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    kinds = [kind for kind, *_ in told["turns"]]
    answered = ["turn user", "turn", "note"]
    assert kinds == ["turn user", "turn", "error", *answered * 3]
    assert "needs an API key" in told["turns"][2][1]
    for _, text, num_drafted in told["turns"][4::3]:
        assert text == SAYS
        assert 0 < num_drafted < len(SAYS)
    assert "drafts accepted" in told["turns"][-1][1]
    assert "running0 of 4" in told["figures"]
    assert "draft 3: " in told["rates"]
    assert told["model"].startswith("toy")


def test_a_conversation_and_what_it_cost(tmp_path: Path) -> None:
    options = ServerOptions(model_names=("toy",), api_keys=("k",))
    with live(toy_engine(SAYS, hit_rate=0.7), options) as server, open_browser(tmp_path) as window:
        window.call("POST", "/url", {"url": server.url})
        ask(window, "hi")
        assert "needs an API key" in window.run(
            "return document.querySelector('.error').textContent"
        )
        window.run("at('key').value = 'k'; at('reset').click()")
        ask(window, "hi")
        ask(window, "again")
        assert turns(window) == ["hi", SAYS, "again", SAYS]
        marked = window.run("return document.querySelectorAll('main .turn .drafted').length")
        assert 0 < marked < 2 * len(SAYS)
        note = window.run("return [...document.querySelectorAll('.note')].at(-1).textContent")
        assert "drafts accepted" in note
        window.run("at('mode').value = 'text'")
        ask(window, "a:")
        assert turns(window)[-1] == SAYS
        time.sleep(1.2)
        figures = window.run("return at('figures').textContent")
        assert "running0 of 4" in figures
        assert window.run("return at('rates').querySelectorAll('meter').length") == 3
        window.screenshot(tmp_path / "page.png")
        others = [line for line in window.console() if "401" not in line and "favicon" not in line]
        assert others == []
