"""A server that answers at once, for the ceiling of the load generator: ready-made events, one write for each token.

    python benchmarks/suite/instant_server.py --port 8000

One event loop; every stream's next event is written in turn, so the client gets them as it would from a server that
decodes in batches, without any pause. Runs until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)


def event(value: dict[str, Any] | None) -> bytes:
    """One server-sent event as one chunk; [DONE] and the end for None."""
    text = b"data: [DONE]\n\n" if value is None else b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(text), text) + (b"0\r\n\r\n" if value is None else b"")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if head.startswith("get "):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            return
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        tokens = int(body["max_tokens"])
        common = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": body["model"]}
        token = event({**common, "choices": [{"index": 0, "text": " token", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        writer.write(HEAD)
        for _ in range(tokens):
            writer.write(token)
            await asyncio.sleep(0)
        await writer.drain()
        writer.write(event({**common, "choices": [], "usage": usage}) + event(None))
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client left
    finally:
        writer.close()


async def serve(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
