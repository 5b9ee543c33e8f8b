"""What all handlers of one application share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from aiohttp import web

from dpi_engine.frontend.interface import EngineClient
from dpi_engine.server.bundle import TokenizerBundle, TokenTexts
from dpi_engine.server.chat_template import ChatTemplate, load_template
from dpi_engine.server.errors import ApiError
from dpi_engine.server.metrics import Metrics
from dpi_engine.server.options import ServerOptions
from dpi_engine.server.sse import EventStream


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request for completions that is being answered. `end_with` set before its task is cancelled: the error that its
    client shall see."""

    task: asyncio.Task[object]
    end_with: ApiError | None = None


@dataclass(eq=False)
class ServerState:
    """The engine client, the tokenizer, the options, and what is going on."""

    client: EngineClient
    bundle: TokenizerBundle
    options: ServerOptions
    metrics: Metrics
    texts: TokenTexts
    template: ChatTemplate | None
    created: int = field(default_factory=lambda: int(time.time()))
    active: set[ActiveRequest] = field(default_factory=set)
    streams: set[EventStream] = field(default_factory=set)
    draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def build(
        cls, client: EngineClient, bundle: TokenizerBundle, options: ServerOptions, metrics: Metrics
    ) -> ServerState:
        """Raises TemplateError for a chat template that cannot be read."""
        source = load_template(options.chat_template, bundle.chat_template)
        template = None if source is None else ChatTemplate(source, bundle.special_tokens)
        return cls(client, bundle, options, metrics, TokenTexts(bundle), template)

    def enter(self) -> ActiveRequest:
        """Count the current task as answering a request."""
        task = asyncio.current_task()
        assert task is not None
        active = ActiveRequest(task)
        self.active.add(active)
        self.idle.clear()
        self.metrics.in_flight(1)
        return active

    def leave(self, active: ActiveRequest) -> None:
        self.active.discard(active)
        self.metrics.in_flight(-1)
        if not self.active:
            self.idle.set()

    def check_model(self, name: str | None) -> str:
        """The served name to answer with. Raises ApiError 404 for a model that is not served here."""
        names = self.options.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist here; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def max_model_len(self) -> int:
        """The most tokens of prompt and answer. Raises ApiError 503 while no rank has told it yet."""
        limit = self.client.max_model_len
        if limit <= 0:
            raise ApiError(503, self.unready_reason() or "no rank has joined yet", code="no_ready_rank")
        return limit

    def unready_reason(self) -> str | None:
        """Why no work can be taken, or None."""
        if self.draining:
            return "draining: the server is shutting down"
        if self.client.ready():
            return None
        ranks = self.client.ranks()
        if not ranks:
            return "no rank has joined yet"
        states = ", ".join(f"rank {r.rank} {r.state}{f' ({r.stage})' if r.stage else ''}" for r in ranks[:8])
        return f"no rank is ready: {states}{', ...' if len(ranks) > 8 else ''}"


STATE: web.AppKey[ServerState] = web.AppKey("state", ServerState)
