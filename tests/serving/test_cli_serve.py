"""`compilespec serve`: what cannot be is said before anything is compiled; HTTPS."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from compilespec.cli import main, serve
from compilespec.cli.flags import FlagParser, compile_keywords, read_adapters, read_arguments
from compilespec.errors import InvalidOption
from compilespec.serving import ServerOptions
from compilespec.serving.options import Binding

SERVER = """
import sys
from compilespec.serving import run
from compilespec.serving.options import Binding
from tests.support.live_server import toy_engine
binding = Binding(port=0, ssl_certfile=sys.argv[1], ssl_keyfile=sys.argv[2])
sys.exit(run(toy_engine("yes"), None, binding))
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would compile and serve."""
    seen: dict[str, Any] = {}

    class Compiled:
        tokenizer = None

    def compile_engine(args: Any, spec: str, **changes: Any) -> Any:
        seen.update(spec=spec, keywords={**compile_keywords(args, spec), **changes})
        return Compiled()

    def run(engine: Any, options: ServerOptions, binding: Binding) -> int:
        seen.update(options=options, binding=binding)
        return 0

    monkeypatch.setattr(serve, "compile_engine", compile_engine)
    monkeypatch.setattr("compilespec.serving.process.run", run)
    monkeypatch.setattr(serve, "_log", lambda *, quiet: None)
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    return seen


def test_flags_reach_engine_options_and_binding(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    monkeypatch.setenv(serve.KEY_VARIABLE, "three")
    flags = ["--model", "org/name", "--port", "0", "--max-batch-size", "3", "--prompt-logprobs",
             "--api-key-file", str(keys), "--max-waiting", "7", "--request-timeout", "9",
             "--drain-timeout", "4", "--tool-format", "llama", "--allowed-origin", "*"]  # fmt: skip
    assert main(["serve", *flags]) == 0
    assert asked["keywords"] == {"max_batch_size": 3, "prompt_logprobs": True}
    assert asked["spec"] == "none"
    assert asked["options"] == ServerOptions(
        model_names=("org/name",), api_keys=("one", "two", "three"), max_waiting=7,
        request_timeout_s=9, tool_format="llama",
        allowed_origins=("*",),
    )  # fmt: skip
    assert asked["binding"] == Binding(port=0, drain_timeout_s=4)
    assert asked["binding"].host == "127.0.0.1"
    assert main(["serve", "--port", "0", "--served-model-name", "a"]) == 0
    assert (asked["spec"], asked["options"].model_names) == ("eagle3", ("a",))


def test_adapters_are_named_or_one_is_merged() -> None:
    assert read_adapters(None) is None
    assert read_adapters(["some/dir"]) == read_adapters("some/dir") == "some/dir"
    assert read_adapters(["a=one", "b=two=2"]) == {"a": "one", "b": "two=2"}
    for given in (["a=one", "two"], ["one", "two"], ["a=one", "a=two"]):
        with pytest.raises(InvalidOption, match="--adapter: expected one DIR, which is merged, or"):
            read_adapters(given)


def test_what_cannot_be_is_said_at_once(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, message in (
            (["--port", port], "cannot listen on 127.0.0.1"),
            (["--port", "0", "--ssl-certfile", "nope"], "certificate cannot be read"),
            (["--port", "0", "--ssl-keyfile", "nope"], "need --ssl-certfile"),
            (["--port", "0", "--api-key-file", str(tmp_path / "empty")], "a key a line"),
            (["--port", "0", "--chat-template", "nope"], "expected a UTF-8 text file"),
            (["--port", "0", "--max-waiting", "-1"], "--max-waiting: expected"),
        ):
            assert main(["serve", *flags]) == 2
            assert message in capsys.readouterr().err
    assert asked == {}
    with pytest.raises(InvalidOption):
        serve.server_options(serve_args(max_body_bytes=0))


def serve_args(**changes: Any) -> Any:
    parser = FlagParser()
    serve.add_parser(parser.add_subparsers())
    args = read_arguments(parser, ["serve"])
    vars(args).update(changes)
    return args


def test_https(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    command = [sys.executable, "-c", SERVER, str(certificate), str(key)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = (re.fullmatch(r"serving on (https://\S+)\n", line) for line in process.stderr)
            found = next(filter(None, told))
            trusted = ssl.create_default_context(cafile=str(certificate))
            with httpx2.Client(base_url=found[1], verify=trusted, trust_env=False) as client:
                assert client.get("/health").json() == {"status": "ready"}
                assert "server" not in client.get("/health").headers
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
