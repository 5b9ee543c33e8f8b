"""What only some clusters have: looked for again and again, since a CRD may come at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dpi_operator.apply.client import Api, ApiError
from dpi_operator.apply.kinds import KINDS, OPTIONAL_GROUPS, OPTIONAL_KINDS

NAMES = (*OPTIONAL_KINDS, *OPTIONAL_GROUPS)


class OptionalKinds:
    """`absent` says of each kind or API group that cannot be used why. `changed`: a look found other kinds."""

    def __init__(self, api: Api, namespaces: Sequence[str] = ()) -> None:
        self._api, self._namespaces = api, tuple(namespaces) or (None,)
        self.absent: dict[str, str] = dict.fromkeys(NAMES, "was not looked for yet")
        self.changed = asyncio.Event()

    @property
    def present(self) -> tuple[str, ...]:
        """Kinds that can be listed and watched."""
        return tuple(k for k in OPTIONAL_KINDS if k not in self.absent)

    async def look(self) -> bool:
        """Ask for all of them. What cannot be asked now stays as it was known: then the answer is False."""
        before = set(self.absent)
        found = await asyncio.gather(*(self._why_absent(name) for name in NAMES))
        for name, why in zip(NAMES, found, strict=True):
            if why is None:
                continue
            if why:
                self.absent[name] = why
            else:
                self.absent.pop(name, None)
        if set(self.absent) != before:
            self.changed.set()
        return None not in found

    async def _why_absent(self, name: str) -> str | None:
        """An empty text for what is there, None when nothing can be said."""
        try:
            if group := OPTIONAL_GROUPS.get(name):
                return "" if await self._api.has_group(group) else f"the cluster does not know {group}; install {name}"
            kind = KINDS[name]
            for namespace in self._namespaces:
                await self._api.call("list", kind, "GET", kind.path(namespace), {"limit": "1"})
        except ApiError as e:
            if e.status == 404:
                return f"the cluster does not know {kind.plural}.{kind.group}"
            if e.status == 403:
                return (
                    f"the operator has no right to {kind.plural}.{kind.group}: set {kind.switch} of its chart, "
                    "and install the CustomResourceDefinition where it is not there"
                )
            return None
        return ""
