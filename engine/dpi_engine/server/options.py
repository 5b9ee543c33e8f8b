"""What the server takes out of the settings, with the defaults of what a settings object does not carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings as the HTTP server uses them.

    `model_names`: the names that requests may use, the first is the one that answers and metrics carry. `body_limit`:
    bytes. `keepalive_s`: a stream silent for this long gets an SSE comment. `write_timeout_s`: a client that takes no
    byte for this long is given up. `dev_endpoints` opens /sleep, /pause, /reset_prefix_cache and the like.
    """

    model_names: tuple[str, ...]
    model_root: str
    api_keys: tuple[str, ...] = ()
    max_logprobs: int = 20
    chat_template: str | None = None
    priority_scheduling: bool = False
    dev_endpoints: bool = False
    trust_request_chat_template: bool = False
    shutdown_timeout_s: float = 30.0
    body_limit: int = 32 * 2**20
    keepalive_s: float = 15.0
    write_timeout_s: float = 300.0
    max_sequences: int = 1024
    log_requests: bool = False

    @classmethod
    def from_settings(cls, settings: Any) -> ServerOptions:
        """Read a `Settings` (or anything with its attribute names)."""

        def get(name: str, default: Any) -> Any:
            value = getattr(settings, name, None)
            return default if value is None else value

        model = str(get("model", "model"))
        served = get("served_model_name", None) or [model]
        keys = get("api_key", None) or []
        return cls(
            model_names=tuple([served] if isinstance(served, str) else served),
            model_root=model,
            api_keys=tuple([keys] if isinstance(keys, str) else keys),
            max_logprobs=get("max_logprobs", 20),
            chat_template=get("chat_template", None),
            priority_scheduling=get("scheduling_policy", "fcfs") == "priority",
            dev_endpoints=bool(get("enable_dev_endpoints", False)),
            trust_request_chat_template=bool(get("trust_request_chat_template", False)),
            shutdown_timeout_s=float(get("shutdown_timeout", 30)),
            body_limit=int(get("max_request_body_bytes", 32 * 2**20)),
            keepalive_s=float(get("sse_keepalive_interval", 15)),
            write_timeout_s=float(get("stream_write_timeout", 300)),
            max_sequences=int(get("max_sequences_per_request", 1024)),
            log_requests=bool(get("enable_log_requests", False)),
        )
