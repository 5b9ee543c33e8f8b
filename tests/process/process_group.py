"""The service that most tests of this folder share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from process_pods import Answer, Pod, until
from process_streams import Stream

TOKEN = "sesame"


def call(pod: Pod, method: str, *args: object, token: str | None = TOKEN) -> Answer:
    """A call of the management API that changes state."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return pod.manage(f"/utility/{method}", list(args), headers)


@contextlib.contextmanager
def paused(head: Pod) -> Iterator[None]:
    """No rank computes inside the block, and requests stay: what runs cannot end before a test has looked at it."""
    answer = call(head, "pause_scheduler", "keep", False)
    assert answer.status == 200, answer.text
    try:
        yield
    finally:
        until(lambda: call(head, "resume_scheduler").status == 200, "the ranks go on")


class Group(NamedTuple):
    """A head with ranks 0 and 1 and two API servers, and a headless pod with ranks 2 and 3."""

    head: Pod
    headless: Pod

    def pids(self) -> dict[str, int]:
        """Of all children of both launchers."""
        return {**self.head.children(), **self.headless.children()}

    def settle(self) -> None:
        """Wait until every process is there, both pods tell the same and nothing runs, whatever the test before did."""
        self.head.until_ready()
        self.headless.until_ready()

        def idle() -> bool:
            status = self.head.manage("/ranks").json
            ranks = {r["rank"]: r for r in status["ranks"]}
            own = self.headless.ranks()
            return (
                not status["missing"]
                and all(r["running"] == r["waiting"] == 0 for r in (*ranks.values(), *own.values()))
                and all(own[n][key] == ranks[n][key] for n in own for key in ("epoch", "boot_id", "pid"))
                and self.servers(lambda s: s["listening"] and s["ready"] and not s["in_flight"])
            )

        until(idle, "four idle ranks and two API servers")
        names = {"coordinator", "api-0", "api-1", *(f"rank-{n}" for n in range(4))}
        until(lambda: self.pids().keys() == names, f"the processes {sorted(names)}")

    def servers(self, condition: Any) -> bool:
        """Do both API servers report, and does the condition hold for the report of each?"""
        reports = self.head.manage("/ranks").json["api_servers"]
        return len(reports) == 2 and all(condition(report) for report in reports)

    def streams_at_both(self, prompt: str, max_tokens: int) -> list[Stream]:
        """Twelve streams or more, so many that each API server has some of them."""
        streams = [Stream(self.head, prompt, max_tokens=max_tokens) for _ in range(12)]

        def both() -> bool:
            if self.servers(lambda s: s["in_flight"] > 0):
                return True
            streams.append(Stream(self.head, prompt, max_tokens=max_tokens))  # the system chose one server for all
            return False

        until(both, "requests in flight in both API servers", every=0.5)
        return streams
