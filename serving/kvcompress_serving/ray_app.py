"""Ray Serve application: replicas of ``vllm serve``, each behind one OpenAI address.

A replica starts ``vllm serve`` on its machine and hands requests on to it, so that every flag,
route and metric of vLLM and of the plugin is the same as without Ray. Ray Serve spreads requests
over replicas, scales their number with the load, and replaces a replica whose server has ended.

    serve run kvcompress_serving.ray_app:app model=FOLDER num_replicas=2 \\
        'flags=--kv-compression semanticache'

This is not ``ray.serve.llm``: its package ``ray[llm]`` is bound to one release of vLLM (0.29.0 in
Ray 2.60) and to its GPU build.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Application
from starlette.requests import Request

from kvcompress_serving import processes
from kvcompress_serving import server as servers

logger = logging.getLogger("ray.serve")

DEPLOYMENT = "vllm"
_HEALTH_TIMEOUT_SECONDS = 20
_METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]
_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer"}
_HOP_BY_HOP |= {"transfer-encoding", "upgrade", "proxy-authenticate", "proxy-authorization"}
_TAKEN = ("--host", "--port", "--uds", "--api-server-count", "--ssl-keyfile", "--ssl-certfile")


def _split(value: Any) -> Any:
    """Flags may be one text, as on a command line."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


class Settings(BaseModel):
    """What is served, and by how many.

    ``serve run`` gives all values as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(description="Model folder, the same path on every machine, or a name.")
    flags: Annotated[tuple[str, ...], BeforeValidator(_split)] = Field(
        default=(), description="Flags of `vllm serve`, as a text or a list."
    )
    num_replicas: int = Field(default=1, ge=1, description="Replicas; the fewest if it scales.")
    max_replicas: int | None = Field(
        default=None, ge=1, description="Most replicas; they follow the load up to it."
    )
    target_ongoing_requests: float = Field(
        default=8, gt=0, description="Requests of a replica above which another is added."
    )
    max_ongoing_requests: int = Field(
        default=256, ge=1, description="Requests that a replica takes before others wait."
    )
    num_cpus: float = Field(default=1, ge=0, description="CPUs that Ray sets aside for a replica.")
    num_gpus: float = Field(default=0, ge=0, description="GPUs, likewise.")
    environment: dict[str, str] = Field(
        default_factory=dict, description="Variables of the servers, on top of the machine's."
    )
    health_seconds: float = Field(default=5, gt=0, description="Time between health checks.")
    logs: str | None = Field(
        default=None, description="Folder for the servers' output; the temporary one by default."
    )
    start_seconds: float = Field(default=900, gt=0, description="Longest start of a server.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Settings:
        reasons = []
        names = {flag.partition("=")[0].replace("_", "-") for flag in self.flags}
        if taken := sorted(names & set(_TAKEN)):
            reasons.append(
                f"flags cannot have {', '.join(taken)}: each replica's server is reached through "
                "Ray Serve alone; set address and port there"
            )
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            reasons.append(
                f"max_replicas = {self.max_replicas} is below num_replicas = {self.num_replicas}"
            )
        if self.target_ongoing_requests > self.max_ongoing_requests:
            reasons.append("target_ongoing_requests is above max_ongoing_requests")
        if reasons:
            raise ValueError("; ".join(reasons))
        return self

    def options(self) -> dict[str, Any]:
        """Of the deployment."""
        options: dict[str, Any] = {
            "name": DEPLOYMENT,
            "max_ongoing_requests": self.max_ongoing_requests,
            "health_check_period_s": self.health_seconds,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }
        if self.max_replicas is None:
            return options | {"num_replicas": self.num_replicas}
        return options | {
            "autoscaling_config": {
                "min_replicas": self.num_replicas,
                "initial_replicas": self.num_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
            }
        }


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _passed_on(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _HOP_BY_HOP}


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        yield from families.values()


def merge_metrics(texts: Mapping[str, str]) -> bytes:
    """One exposition of several, told apart by the label ``replica``.

    Args:
        texts: in Prometheus's text format, by replica.
    """
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


Start = Callable[..., AbstractContextManager[servers.Server]]
"""What starts a server, `servers.serve`."""

# Ray Serve copies the class below to the replicas, with what its module holds up to here
routes = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)


@serve.deployment
@serve.ingress(routes)
class Replica:
    """One ``vllm serve`` and the way to it."""

    def __init__(self, settings: Settings, start: Start = servers.serve) -> None:
        self._name = serve.get_replica_context().replica_tag
        log = Path(settings.logs or tempfile.gettempdir()) / f"vllm-kvcompress-{self._name}.log"
        self._stack = contextlib.ExitStack()
        self._server = self._stack.enter_context(
            start(
                settings.model,
                # the name that vLLM gives by itself, unless a flag says another
                *("--served-model-name", settings.model, *settings.flags),
                log=log,
                environment=settings.environment,
                timeout=settings.start_seconds,
            )
        )
        # answers take as long as they take; a connection that the client closes ends them
        self._client = httpx.AsyncClient(base_url=self._server.url, timeout=None)
        self._closing = False
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def _end_with_server(self) -> None:
        """A replica that outlives its server would go on refusing what others could answer."""
        watch = select.poll()
        watch.register(os.pidfd_open(self._server.pid), select.POLLIN)
        watch.poll()
        if not self._closing:
            logger.error("vllm serve has ended\n%s", processes.tail(self._server.log))
            # a server that was killed outright leaves its engine behind
            processes.kill(self._server.pid)
            os._exit(1)

    def __del__(self) -> None:
        # called by Ray Serve when it takes the replica away; __init__ may have failed
        if hasattr(self, "_stack"):
            self._closing = True
            self._stack.close()

    async def check_health(self) -> None:
        """Called by Ray Serve; an engine that does not answer is replaced."""
        answer = await self._client.get("/health", timeout=_HEALTH_TIMEOUT_SECONDS)
        answer.raise_for_status()

    async def exposition(self) -> tuple[str, str]:
        """This replica's name and what its server shows on ``/metrics``."""
        return self._name, (await self._client.get("/metrics", timeout=30)).text

    @routes.get("/metrics")
    async def metrics(self) -> Response:
        """All replicas' metrics, with the label ``replica``."""
        own = serve.get_replica_context()
        handle = serve.get_deployment_handle(own.deployment, own.app_name)
        answers = await handle.broadcast("exposition").results_async(return_exceptions=True)
        # one that is starting or ending has nothing to show
        texts = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return Response(merge_metrics(texts), media_type=CONTENT_TYPE_LATEST)

    @routes.api_route("/{path:path}", methods=_METHODS)
    async def forward(self, request: Request) -> Response:
        """Everything else, to the server and back as it comes."""
        sent = self._client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=_passed_on(request.headers.items()),
            content=await request.body(),
        )
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.TransportError as error:
            message = f"this replica's server does not answer ({type(error).__name__}); try again"
            body = {"error": {"message": message, "type": "unavailable", "code": 503}}
            return JSONResponse(body, 503, {"Retry-After": "1"})
        return StreamingResponse(
            _pieces(answer), answer.status_code, _passed_on(answer.headers.items())
        )


def app(settings: Settings | dict[str, Any]) -> Application:
    """The application, for ``serve run`` and ``serve.run``.

    Args:
        settings: or its fields.

    Raises:
        ValueError: a field is wrong.
    """
    checked = Settings.model_validate(settings)
    deployment: Any = Replica
    return deployment.options(**checked.options()).bind(checked)
