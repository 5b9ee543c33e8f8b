"""Events on the object and on the pod concerned; one matter is told once in ten minutes."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any

from dpi_operator.api.types import API_VERSION, KIND
from dpi_operator.apply.client import Api, ApiError
from dpi_operator.plan.actions import EmitEvent
from dpi_operator.plan.names import MANAGER
from dpi_operator.plan.refusals import is_terminating
from dpi_operator.plan.times import to_text

log = logging.getLogger(__name__)

REPEAT_S = 600.0
MAX_KNOWN = 10_000
MAX_MESSAGE = 1024


class Events:
    """Posts events. An event that cannot be posted is logged, nothing else depends on it."""

    def __init__(self, api: Api, instance: str) -> None:
        self._api, self._instance = api, instance
        self._known: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    async def emit(self, event: EmitEvent, owner: dict[str, Any]) -> None:
        """`owner`: metadata of the object."""
        key, now = (owner["uid"], event.reason.value, event.key or event.message), time.monotonic()
        if now - self._known.get(key, -REPEAT_S) < REPEAT_S:
            return
        self._known[key] = now
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        namespace = owner["namespace"]
        about = [{"apiVersion": API_VERSION, "kind": KIND, "name": owner["name"], "uid": owner["uid"]}]
        if event.pod is not None:
            about.append({"apiVersion": "v1", "kind": "Pod", "name": event.pod[0], "uid": event.pod[1]})
        told = False
        for involved in about:
            try:
                await self._api.create("Event", namespace, self._body(event, {**involved, "namespace": namespace}))
            except ApiError as e:
                if is_terminating(e.message):
                    return  # the end of everything in a namespace is no news of this object
                log.warning("event %s of %s/%s not posted: %s", event.reason.value, namespace, owner["name"], e)
            if not told:
                level, told = logging.WARNING if event.warning else logging.INFO, True
                log.log(level, "%s/%s: %s: %s", namespace, owner["name"], event.reason.value, event.message)

    def _body(self, event: EmitEvent, involved: dict[str, Any]) -> dict[str, Any]:
        now = to_text(time.time())
        text = event.message
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{involved['name'][:50]}-", "namespace": involved["namespace"]},
            "involvedObject": involved,
            "reason": event.reason.value,
            "message": text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "...",
            "type": "Warning" if event.warning else "Normal",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
        }
