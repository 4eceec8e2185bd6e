"""The application: routes over one engine, in OpenAI's protocol and Anthropic's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from compilespec.runtime.engine import Engine
from compilespec.serving.admin import add_admin_routes
from compilespec.serving.answers import json_answer
from compilespec.serving.chat import answer_chat, chat_prompt
from compilespec.serving.completions import complete
from compilespec.serving.errors import MESSAGES, ApiError
from compilespec.serving.guard import Guard, cors
from compilespec.serving.messages import answer_messages, count_tokens
from compilespec.serving.options import ServerOptions
from compilespec.serving.protocol import DetokenizeRequest, TokenizeRequest, read_body
from compilespec.serving.responses import (
    answer_responses,
    remove_stored,
    stored_input,
    stored_response,
)
from compilespec.serving.service import Service
from compilespec.serving.stored import StoredResponses
from compilespec.serving.telemetry import Telemetry, stats_of

OF_TOKENIZER = (
    "bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "padding_side",
    "truncation_side", "clean_up_tokenization_spaces", "add_bos_token", "add_eos_token",
)  # fmt: skip
PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(engine: Engine, options: ServerOptions | None = None) -> FastAPI:
    """An ASGI application that serves the engine, which it owns from now on.

    Args:
        engine: what `compile` returned; `app.state.service.close()`, or the end of the
            application's lifespan, closes it.
        options: None takes the defaults.
    Raises: as `Engine.serve`; MissingDependency without the extra `serve`.
    """
    options = options or ServerOptions()
    service = Service(engine, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="compilespec", lifespan=lifespan, docs_url=None, redoc_url=None,
                  openapi_url=None)  # fmt: skip
    app.state.service = service
    _add_routes(app, service)
    _add_response_routes(app, service)
    if options.admin_keys:
        add_admin_routes(app, service)
    paths = (*(getattr(route, "path", "") for route in app.routes), "/metrics")
    telemetry = Telemetry(service, paths)
    app.add_api_route("/metrics", _metrics_route(telemetry), methods=["GET"])
    app.add_middleware(Guard, options=options, observe=telemetry.observe)
    app.add_middleware(cors, options=options)  # outermost, so that errors have its headers too
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(service, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer_chat(service, request)

    @app.post(MESSAGES)
    async def messages(request: Request) -> Response:
        return await answer_messages(service, request)

    @app.post(f"{MESSAGES}/count_tokens")
    async def count(request: Request) -> Response:
        return await count_tokens(service, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer(
            {"object": "list", "data": [_model(service, n) for n in _names(service)]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_answer(_model(service, name))

    @app.get("/health")
    async def health() -> Response:
        state = service.thread.health().state
        return json_answer({"status": state}, 200 if state == "ready" else 503)

    @app.get("/stats")
    async def stats() -> Response:
        return json_answer(stats_of(service))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = await read_body(request, TokenizeRequest)
        return json_answer(await service.off_the_loop(lambda: _tokenize(service, asked)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = await read_body(request, DetokenizeRequest)
        return json_answer(await service.off_the_loop(lambda: _detokenize(service, asked)))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_answer(_tokenizer_info(service))

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(
            PAGE.read_text(encoding="utf-8"),
            headers={"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"},
        )


def _add_response_routes(app: FastAPI, service: Service) -> None:
    stored = StoredResponses(
        int(service.options.stored_responses_mib * 2**20), service.options.stored_responses_dir
    )

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer_responses(service, stored, request)

    @app.get("/v1/responses/{name}")
    async def response(name: str) -> Response:
        return await stored_response(service, stored, name)

    @app.delete("/v1/responses/{name}")
    async def remove(name: str) -> Response:
        return await remove_stored(service, stored, name)

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(name: str) -> Response:
        return await stored_input(service, stored, name)


def _metrics_route(telemetry: Telemetry) -> Any:
    async def metrics() -> Response:
        text, kind = telemetry.text()
        return Response(text, headers={"Content-Type": kind})

    return metrics


def _names(service: Service) -> tuple[str, ...]:
    return service.names


def _model(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "compilespec",
        "max_model_len": engine.geometry.config.max_seq_len,
        "method": engine.plan().get("method"),
        "num_draft_tokens": list(engine.geometry.config.draft_counts),
    }


def _tokenize(service: Service, asked: TokenizeRequest) -> dict[str, Any]:
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "expected a prompt, or messages; give one of them")
    prompt: Any = asked.prompt
    if asked.messages is not None:
        prompt = chat_prompt(asked, asked.tools)
    if asked.add_special_tokens or asked.prompt is None or service.tokenizer is None:
        ids = service.engine.encode(prompt)
    else:
        ids = service.tokenizer.encode(asked.prompt, add_special_tokens=False)
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": service.engine.geometry.config.max_seq_len,
    }


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """The tokenizer's fields by the names of tokenizer_config.json, as vLLM and lm-eval have
    them.
    """
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the model has no tokenizer", code="not_found")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.engine.geometry.config.max_seq_len,
        **{name: getattr(tokenizer, name, None) for name in OF_TOKENIZER},
    }


def _detokenize(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(asked.model)
    if service.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer")
    service.engine.encode(asked.tokens)  # refuses ids that do not exist
    return {"prompt": str(service.tokenizer.decode(asked.tokens))}


def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


def _http_error(request: Request, error: Exception) -> Response:
    """Answer the router's errors: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    told = ApiError(error.status_code, f"there is no {what}; see GET /v1/models", code=code)
    return told.response(request.url.path, error.headers)
