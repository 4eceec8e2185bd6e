"""Other weights over HTTP: the key, the files, the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from starlette.testclient import TestClient

import compilespec
from compilespec.serving import ServerOptions, create_app
from tests.support.models import tiny_target

PATH = "/v1/admin/update_weights"
PROMPT = {
    "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip


def client_of(**options: Any) -> TestClient:
    model = tiny_target("llama", seed=0, num_layers=2)
    engine = compilespec.compile(model, backend="eager", max_batch_size=2, max_seq_len=64)
    return TestClient(create_app(engine, ServerOptions(**options)))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(api_keys=("user",), admin_keys=("admin",)) as client:
        yield client


def ask(client: TestClient, key: str, body: dict[str, Any], path: str = PATH) -> Any:
    return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def test_the_weights_of_a_file_or_a_directory_serve_the_next_request(
    client: TestClient, tmp_path: Path
) -> None:
    other = tiny_target("llama", seed=1, num_layers=2)
    before = ask(client, "user", PROMPT, "/v1/completions").json()["choices"][0]
    state = {name: tensor.contiguous() for name, tensor in other.state_dict().items()}
    save_file(state, tmp_path / "step.safetensors")
    answer = ask(client, "admin", {"path": str(tmp_path / "step.safetensors")})
    assert (answer.status_code, answer.json()) == (200, {"weights_version": 1})
    after = ask(client, "user", PROMPT, "/v1/completions").json()["choices"][0]
    want = other.generate(torch.tensor([PROMPT["prompt"]]), max_new_tokens=8, do_sample=False)
    assert after["token_ids"] == want[0, 4:].tolist()
    assert after != before
    tiny_target("llama", seed=0, num_layers=2).save_pretrained(tmp_path / "model")
    answer = ask(client, "admin", {"path": str(tmp_path / "model"), "policy": "continue"})
    assert answer.json() == {"weights_version": 2}
    again = ask(client, "user", PROMPT, "/v1/completions").json()["choices"][0]
    assert again["token_ids"] == before["token_ids"]


@pytest.mark.parametrize("key", ["user", "other", ""])
def test_other_keys_are_refused(client: TestClient, key: str) -> None:
    answer = ask(client, key, {"path": "x"})
    assert answer.status_code == 401
    assert "admin key" in answer.json()["error"]["message"]


def test_what_is_wrong_is_named(client: TestClient, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    for body, message in (
        ({}, "expected path"),
        ({"path": str(tmp_path / "no.safetensors")}, "file that exists"),
        ({"path": str(tmp_path / "x.safetensors")}, "update_weights: x: no such tensor"),
        ({"draft_path": str(tmp_path / "x.safetensors")}, "needs a drafter"),
        ({"path": "x", "policy": "now"}, "policy"),
    ):
        answer = ask(client, "admin", body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_without_an_admin_key_there_is_no_such_route() -> None:
    with client_of(api_keys=("user",)) as client:
        assert ask(client, "user", {"path": "x"}).status_code == 404
