"""Routes for whoever owns the model: other weights for the server that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fastapi import FastAPI, Request
from torch import Tensor, nn

from compilespec.errors import EngineClosed, SpecError
from compilespec.serving.errors import api_error, bad_request
from compilespec.serving.protocol import Asked, read_body
from compilespec.serving.service import Service
from compilespec.tracing.checkpoint_files import read_tensors, read_weight_file
from compilespec.tracing.load import load_target


class UpdateWeightsRequest(Asked):
    """The body of /v1/admin/update_weights."""

    path: str | None = None
    draft_path: str | None = None
    policy: Literal["finish", "continue"] = "finish"


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Routes below /v1/admin/, which `Guard` opens with an admin key alone."""

    @app.post("/v1/admin/update_weights")
    async def update_weights(request: Request) -> dict[str, int]:
        asked = await read_body(request, UpdateWeightsRequest)
        try:  # not on the threads that read prompts: it may wait for requests that run
            version = await asyncio.to_thread(_update, service, asked)
        except EngineClosed as error:
            raise api_error(error) from error
        except SpecError as error:
            raise bad_request(str(error)) from error
        return {"weights_version": version}


def _update(service: Service, asked: UpdateWeightsRequest) -> int:
    if asked.path is None and asked.draft_path is None:
        raise bad_request("expected path, draft_path, or both: files that this server can read")
    weights = None if asked.path is None else _weights(service, Path(asked.path))
    draft = None if asked.draft_path is None else _tensors(Path(asked.draft_path))
    return service.thread.update_weights(weights, draft, asked.policy)


def _weights(service: Service, path: Path) -> Mapping[str, Tensor] | nn.Module:
    """A model's directory, loaded as at the start, or a file by the names of its tensors."""
    if path.is_dir():
        return load_target(path, dtype=service.engine.geometry.config.dtype, device="cpu").model
    return _tensors(path)


def _tensors(path: Path) -> dict[str, Tensor]:
    return read_tensors(path) if path.is_dir() else read_weight_file(path)
