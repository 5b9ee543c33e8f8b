"""What must outlive pods and the operator: failures, back-off, evidence, and how far a rollout is.

Kept in the ConfigMap <name>-state, written before any pod is deleted for a failure.
"""

from __future__ import annotations

import msgspec

from dpi_operator.api.status import MAX_MESSAGE

STATE_KEY = "state.json"
MAX_EVIDENCE = 3
"""Endings kept per failure domain."""

MAX_HANDLED = 64
"""Pods remembered as counted, per failure domain."""

MAX_TOTAL_EVIDENCE = 512
"""Endings kept per object, so that the ConfigMap stays small."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a pod ended. Times are RFC 3339."""

    pod: str
    uid: str = ""
    node: str = ""
    rank_start: int = 0
    rank_count: int = 1
    container: str = ""  # the one that ended, where that is not the engine's
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    started_at: str = ""
    finished_at: str = ""


class Domain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Failures of what is recreated together: one pod, or one group. Times are epoch seconds."""

    attempts: int = 0
    last: float | None = None
    due: float | None = None
    handled: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    recreating: bool = False  # a group whose every pod has to go before the first one comes back
    releases: int = 0  # times that a group gave back the nodes of some pods, since others found none
    held: float | None = None  # until then it is not tried again


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    version: int = 1
    domains: dict[str, Domain] = {}
    formed: dict[str, float] = {}  # groups whose ranks have all joined, and when first
    current: str = ""  # revision that serves
    switched: float | None = None  # BlueGreen: when traffic went to `current`
    rolling: bool = False  # groups of another revision are being replaced
    progress: str = ""  # how far the rollout is, in a form that changes with every step of it
    progress_at: float | None = None
    tried: str = ""  # newest revision that the API server was asked about
    refusal: str = ""  # why it would not take pods of that revision; empty: it would
    tried_at: float | None = None
    proven: tuple[str, ...] = ()  # revisions of which a group has served
    old: tuple[tuple[str, int], ...] = ()  # their groups that a rollout still keeps: by revision and index
    dismissed: tuple[str, ...] = ()  # uids of pods that are on their way out because they were no longer wanted


def read_state(text: str | None) -> tuple[State, str]:
    """State in a ConfigMap's value, and what is wrong with it (then the state is empty)."""
    if not text:
        return State(), ""
    try:
        return msgspec.json.decode(text.encode(), type=State), ""
    except (msgspec.MsgspecError, UnicodeError) as e:
        return State(), f"cannot be read ({e}); failures are counted from zero"


def write_state(state: State) -> str:
    return msgspec.json.format(msgspec.json.encode(state), indent=1).decode()


def clip(message: str, limit: int = MAX_MESSAGE) -> str:
    """The end of a message: engines say last what killed them."""
    text = message.strip()
    return text if len(text) <= limit else "..." + text[-(limit - 3) :]


def bounded(state: State) -> State:
    """State within the bounds: of all endings only the newest are kept."""
    total = sum(len(d.evidence) for d in state.domains.values())
    if total <= MAX_TOTAL_EVIDENCE:
        return state
    newest = sorted(state.domains, key=lambda k: state.domains[k].last or 0.0, reverse=True)
    left, domains = MAX_TOTAL_EVIDENCE, dict(state.domains)
    for key in newest:
        kept = domains[key].evidence[: max(0, left)]
        left -= len(kept)
        domains[key] = msgspec.structs.replace(domains[key], evidence=kept)
    return msgspec.structs.replace(state, domains=domains)
