"""The application that `serve run compilespec.serving.ray:build` deploys."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve

from compilespec.errors import InvalidOption
from compilespec.serving.options import ServerOptions
from compilespec.serving.ray.ingress import Ingress
from compilespec.serving.ray.replica import Replica
from compilespec.serving.ray.router import PrefixRouter

KEY_VARIABLE = "COMPILESPEC_API_KEY"
HEALTH_PERIOD_S = 5.0
ROWS = 8  # the default of max_batch_size


class Arguments(BaseModel):
    """The arguments of `build`: `args` of a config file, or `name=value` of `serve run`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "demo"
    spec: str | None = None
    """None: eagle3 for the demo, else none."""

    compile: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of `compilespec.compile`."""

    server: dict[str, Any] = Field(default_factory=dict)
    """Fields of `ServerOptions`."""

    num_replicas: int = 1
    """The number of replicas without autoscaling."""

    autoscaling: dict[str, Any] | None = None
    """Ray Serve's `autoscaling_config`; by default it aims at full batches."""

    cpus_per_replica: float = 1
    gpus_per_replica: float = 0
    num_ingresses: int = 1
    """Replicas of the HTTP ingress; each knows the prefixes that went through it."""

    drain_timeout_s: float = 60.0
    """Seconds for a replica's requests to end before the replica does."""


def build(args: dict[str, Any]) -> serve.Application:
    """An application of Ray Serve: engines behind one set of routes.

    Args: args: see `Arguments`.
    Raises: InvalidOption.
    """
    try:
        asked = Arguments.model_validate(args)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidOption(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    options = _server_options(asked)
    engines = serve.deployment(Replica).options(**_engine_options(asked, options))
    spec = asked.spec or ("eagle3" if asked.model == "demo" else "none")
    ingress = serve.deployment(Ingress).options(
        num_replicas=asked.num_ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the engines enforce limits
        graceful_shutdown_timeout_s=asked.drain_timeout_s,
    )
    return ingress.bind(engines.bind(asked.model, spec, asked.compile, options), options)


def _server_options(asked: Arguments) -> ServerOptions:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in asked.server.items()
    }
    if given.get("admin_keys"):
        raise InvalidOption("server: admin_keys: one replica would get the weights; leave it out")
    given.setdefault("model_names", (asked.model,))
    if key := os.environ.get(KEY_VARIABLE):
        given["api_keys"] = (*given.get("api_keys", ()), key)
    try:
        return ServerOptions(**given)
    except TypeError as error:
        raise InvalidOption(f"server: {error}") from error


def _engine_options(asked: Arguments, options: ServerOptions) -> dict[str, Any]:
    rows = int(asked.compile.get("max_batch_size", ROWS))
    waiting = options.max_waiting
    told: dict[str, Any] = {
        "max_ongoing_requests": 10_000 if waiting is None else rows + waiting,
        "max_queued_requests": -1 if waiting is None else max(waiting, 1),
        "ray_actor_options": {
            "num_cpus": asked.cpus_per_replica, "num_gpus": asked.gpus_per_replica,
        },
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": asked.drain_timeout_s,
        "request_router_config": {
            "request_router_class": PrefixRouter, "request_router_kwargs": {"max_lead": rows},
        },
    }  # fmt: skip
    if asked.autoscaling is None:
        told["num_replicas"] = asked.num_replicas
    else:
        told["autoscaling_config"] = {"target_ongoing_requests": rows, **asked.autoscaling}
    return told
