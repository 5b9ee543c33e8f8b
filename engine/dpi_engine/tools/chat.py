"""`dpi chat`: one question, or a conversation, against an endpoint."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from dpi_engine.launch.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from dpi_engine.tools.arguments import finite, utf8


class ChatCommand:
    name = "chat"
    help = "ask a chat model one question, or talk to it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from dpi_engine.tools.endpoint import add_endpoint_arguments

        parser.add_argument("question", nargs="?", type=utf8, help="one question; without it a conversation starts")
        add_endpoint_arguments(parser)
        parser.add_argument("--system", type=utf8, help="system prompt")
        parser.add_argument("--max-tokens", type=int, default=256, help="longest answer in tokens (256)")
        parser.add_argument("--temperature", type=finite, default=0.0, help="0 is greedy (0)")
        parser.add_argument("--echo", action="store_true", help="print the question before the answer")

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        from dpi_engine.tools.endpoint import EndpointError

        if args.max_tokens < 1:
            print("dpi chat: --max-tokens must be at least 1", file=sys.stderr)
            return EXIT_USAGE
        try:
            return asyncio.run(_main(args))
        except EndpointError as e:
            print(f"dpi chat: {e}", file=sys.stderr)
            return e.code
        except NoText as e:
            print(f"dpi chat: {e}", file=sys.stderr)
            return EXIT_USAGE
        except (KeyboardInterrupt, EOFError) as e:
            print()
            return EXIT_OK if isinstance(e, EOFError) else EXIT_INTERRUPTED


class NoText(ValueError):
    """What was typed cannot be sent."""


def _question() -> str:
    """A line that was typed. Raises NoText.

    Ctrl-C ends it: asyncio's own handler cancels a task, which a waiting read never sees.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = input("> ").strip()
        line.encode()  # some locales let bytes through that are no text
        return line
    except UnicodeError:
        raise NoText("standard input: expected text in UTF-8") from None
    finally:
        signal.signal(signal.SIGINT, before)


async def _answer(endpoint: Any, model: str, messages: list[dict[str, str]], args: argparse.Namespace) -> str:
    """Stream one answer to standard output; returns its text."""
    body = {"model": model, "messages": messages, "max_tokens": args.max_tokens, "temperature": args.temperature}
    text, reason = "", None
    async for event in endpoint.stream("/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = (choice.get("delta") or {}).get("content") or ""
            text += piece
            reason = choice.get("finish_reason") or reason
            print(piece, end="", flush=True)
    print(f" [cut at {args.max_tokens} tokens]" if reason == "length" else "", flush=True)
    return text


async def _main(args: argparse.Namespace) -> int:
    from dpi_engine.tools.endpoint import Endpoint

    messages = [{"role": "system", "content": args.system}] if args.system else []
    async with Endpoint(args.url, args.api_key) as endpoint:
        model = args.model or await endpoint.first_model()
        if args.question is not None:
            if args.echo:
                print(f"\n> {args.question}", flush=True)
            await _answer(endpoint, model, [*messages, {"role": "user", "content": args.question}], args)
            return EXIT_OK
        print(f"{model} at {endpoint.base}; an empty line or Ctrl-D ends", file=sys.stderr)
        while question := _question():
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": await _answer(endpoint, model, messages, args)})
    return EXIT_OK


COMMAND = ChatCommand()
