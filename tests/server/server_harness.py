"""A small real tokenizer, and the application on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from echo_client import EchoClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dpi_engine.server.app import make_app
from dpi_engine.server.options import ServerOptions
from dpi_engine.server.serving import listening
from dpi_engine.server.state import STATE, ServerState

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

DEADLINE_S = 240.0
"""A bound for what hangs; far beyond what a loaded machine takes."""


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges of English, three special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog lay on the log"] * 20, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    return tokenizer


TOKENIZER = make_tokenizer()


@dataclass(frozen=True)
class Bundle:
    tokenizer: Tokenizer = TOKENIZER
    chat_template: str | None = CHATML
    eos_ids: tuple[int, ...] = (TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>"))
    special_tokens: dict[str, str] = field(default_factory=lambda: dict(SPECIAL))


def options(**changes: Any) -> ServerOptions:
    return ServerOptions(**({"model_names": ("echo", "echo-alias"), "model_root": "echo-root"} | changes))


def echo_client(**changes: Any) -> EchoClient:
    return EchoClient(vocab_size=TOKENIZER.get_vocab_size(), **changes)


@dataclass
class Running:
    """The server under test; `url` without a slash at the end."""

    url: str
    host: str
    port: int
    client: EchoClient
    app: web.Application
    http: aiohttp.ClientSession
    state: ServerState = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.app[STATE]

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.http.post(self.url + path, json=body, **more) as response:
            return response.status, await response.json()

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **more) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def events(self, path: str, body: Any, **more: Any) -> list[str]:
        """Data of all server-sent events of a POST, the end mark included."""
        async with self.http.post(self.url + path, json=body, **more) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


@contextlib.asynccontextmanager
async def running(
    client: EchoClient | None = None, bundle: Bundle | None = None, *, send_buffer: int | None = None, **changes: Any
) -> AsyncIterator[Running]:
    """The application on a free port of the loopback. `send_buffer`: what the kernel may hold for each connection."""
    client = client or echo_client()
    app = make_app(client, bundle or Bundle(), options(**({"shutdown_timeout_s": 0.2} | changes)))
    sock = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted connections inherit it
    async with listening(app, "", 0, sock=sock) as (host, port), aiohttp.ClientSession() as http:
        yield Running(f"http://{host}:{port}", host, port, client, app, http)


def drive(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine under a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S / 2) -> None:
    """Wait for a condition, turn by turn of the loop; fails with `what` after the deadline."""
    limit = asyncio.get_running_loop().time() + deadline_s
    while not condition():
        assert asyncio.get_running_loop().time() < limit, what
        await asyncio.sleep(0.001)
