"""A front end that comes back learns its ranks again, and what became of the requests it had."""

from __future__ import annotations

from typing import Any

import pytest
from wire_harness import FrontEnd, Stage, until

from dpi_engine.wire.codec import decode_ready_response
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.inbox import InboxItem, LinkEvent
from dpi_engine.wire.messages import Dialect


def take(link: EngineLink, kind: LinkEvent) -> InboxItem:
    seen: list[Any] = []

    def look() -> InboxItem | None:
        seen.extend(link.inbox.drain())
        return next((item for item in seen if item.kind is kind), None)

    return until(look, f"{kind} in the inbox")


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_front_end_started_anew_gets_the_ready_response_again(dialect: Dialect, transport: str) -> None:
    with Stage(transport=transport, size=1, dialect=dialect) as stage:
        link = stage.up(0)
        first = stage.fronts[0]
        identity, ready = first.read(first.router, "introduction")
        inputs, outputs = first.input, first.output
        for _ in range(2):
            stage.fronts[0].close()
            assert take(link, LinkEvent.CLIENT_DROPPED).client_index == 0
            stage.fronts[0] = FrontEnd(stage.context, {"in": inputs, "out": outputs}.__getitem__)
            again = stage.fronts[0].read(stage.fronts[0].router, "introduction after a restart")
            assert again == [identity, ready]
            assert decode_ready_response(again[1]).max_model_len == 512
            assert take(link, LinkEvent.CLIENT_BACK).client_index == 0


def test_a_front_end_that_stays_is_introduced_once() -> None:
    with Stage(size=1, front_ends=2) as stage:
        link = stage.up(0)
        for front in stage.fronts:
            front.read(front.router, "introduction")
        stage.fronts[1].close()
        take(link, LinkEvent.CLIENT_DROPPED)
        assert not stage.fronts[0].router.poll(300)
