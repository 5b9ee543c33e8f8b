"""Names in the pages exist in the code; tables that claim to be complete are."""

from __future__ import annotations

import ast
import errno
import os
import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, code_spans, section, spans, table_rows
from server_harness import Bundle, echo_client, options

from dpi_engine import cli
from dpi_engine.config.errors import ParallelError
from dpi_engine.config.loading import FlagParser
from dpi_engine.config.model_spec import ARCHITECTURES, GGUF_ARCHITECTURES
from dpi_engine.config.parallel import Ports
from dpi_engine.config.pod import PodIdentity
from dpi_engine.config.refusals import advice
from dpi_engine.config.settings import FIELDS, MAX_API_SERVERS, Settings, parse_serve
from dpi_engine.frontend import events, utility
from dpi_engine.frontend.interface import EngineError
from dpi_engine.launch import exit_codes
from dpi_engine.launch.launcher import Launcher
from dpi_engine.launch.management import make_management_app
from dpi_engine.server import metrics_table, refusals
from dpi_engine.server.app import make_app
from dpi_engine.server.dev_routes import DEV_ROUTES
from dpi_engine.server.schemas.chat import ChatRequest
from dpi_engine.server.schemas.completions import CompletionRequest
from dpi_engine.wire.errors import Refusal
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.messages import WIRE_VERSION, RankInfo, RankState
from dpi_operator.api import docs as manifest_docs
from dpi_operator.local.pods import EXIT_CONFIG
from dpi_operator.telemetry import REGISTRY

REFERENCE = DOCS / "reference"
ENGINE = ROOT / "engine" / "dpi_engine"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def _known_flags() -> set[str]:
    flags = {"--out", "--help", "--version", "--secret"}  # the last is buildah's
    for name, load in cli.commands().items():
        parser = FlagParser(prog=name, allow_abbrev=False)
        load().add_arguments(parser)
        flags |= set(parser._option_string_actions)
    for tool in [
        *(ROOT / "tools").glob("*.py"),
        *(ENGINE / "tools").glob("*.py"),
    ]:  # scripts of the checkout, with parsers of their own
        flags |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', tool.read_text("utf-8")))
    return flags


FLAGS = _known_flags()


def test_the_table_of_architectures_is_complete() -> None:
    rows = [
        row for row in table_rows((DOCS / "how-to" / "serve-a-model.md").read_text("utf-8")) if "ForCausalLM" in row[0]
    ]
    assert sorted(name for row in rows for name in spans(row[0])) == sorted(ARCHITECTURES)
    assert {name for row in rows for name in spans(row[1])} == set(GGUF_ARCHITECTURES)


# ------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", NAMES)
def test_flags_exist_or_are_refused_by_name(name: str) -> None:
    for span in code_spans(ROOT / name):
        if span.startswith(("curl", "pip", "kubectl", "helm")):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])", span):
            assert flag in FLAGS or advice(flag), f"{name}: {flag}"


UNBUILT = {
    "--pipeline-parallel-size": "-pp 2",
    "--data-parallel-backend": "-dpb ray",
    "--block-size": "--block-size 32",
    "--quantization": "-q awq",
}
"""Flags that are read and whose value is refused, each with a command line that shows it."""


def test_the_list_of_refusals_is_true() -> None:
    rows = table_rows(section(REFERENCE / "differences-from-vllm.md", "Refused in this version"))
    written = {word.split()[0] for row in rows for word in spans(row[0]) if word.startswith("--")}
    by_name = {flag for flag in written if advice(flag)}
    assert written - by_name - {"--headless"} == set(UNBUILT)
    for argv in UNBUILT.values():
        with pytest.raises(ParallelError, match="not in this version"):
            parse_serve(["m", *argv.split()])


def test_help_says_which_flags_are_refused() -> None:
    assert {f.option for f in FIELDS if "not in this version" in f.flag.help} == set(UNBUILT)


def test_defaults_in_the_table_of_differences() -> None:
    here = {row[0]: row[2] for row in table_rows(section(REFERENCE / "differences-from-vllm.md", "Defaults and flags"))}
    settings = Settings(model="m")
    assert here["`--max-num-seqs`, `--max-num-batched-tokens`"] == (
        f"{settings.max_num_seqs}, {settings.max_num_batched_tokens}"
    )
    assert here["`--block-size`"] == str(settings.block_size)
    assert here["`--shutdown-timeout`"].startswith(f"{settings.shutdown_timeout:g} s")


def test_environment_variables_exist_and_are_taken() -> None:
    read = set()
    for file in [*ENGINE.rglob("*.py"), *(ROOT / "operator").rglob("*.py")]:
        read |= set(re.findall(r"[\"'](DPI_[A-Z_]*[A-Z])[\"']", file.read_text("utf-8")))
    settings = {f.env for f in FIELDS}
    rows = table_rows(section(REFERENCE / "cli.md", "Environment"))
    listed = {word for row in rows for word in spans(row[0]) if word.startswith("DPI_")}
    assert listed == read - settings
    named = {n for page in PAGES for n in re.findall(r"\bDPI_[A-Z_]*[A-Z]\b", page.read_text("utf-8"))}
    assert named <= listed | settings
    values = {"DPI_CONFIG": "", "DPI_POD_IP": "10.0.0.1"}
    assert parse_serve(["m"], {name: values.get(name, "x") for name in listed}).model == "m"


# --------------------------------------------------------------------------------------------------- numbers and words


def test_exit_codes_are_the_codes() -> None:
    code = {(str(v), k) for k, v in vars(exit_codes).items() if k.startswith("EXIT_")}
    rows = table_rows((REFERENCE / "exit-codes.md").read_text("utf-8"))
    assert {(row[0], row[1].strip("`")) for row in rows} == code
    assert set(EXIT_CONFIG) == {exit_codes.EXIT_USAGE, exit_codes.EXIT_REFUSED}


def test_exit_codes_have_one_home() -> None:
    for file in ENGINE.rglob("*.py"):
        if file.name != "exit_codes.py":
            assert not re.search(r"^EXIT_\w+ = \d|_EXIT = \d", file.read_text("utf-8"), re.MULTILINE), file


@pytest.mark.parametrize("name", NAMES)
def test_exit_codes_in_the_text_are_known(name: str) -> None:
    known = {v for k, v in vars(exit_codes).items() if k.startswith("EXIT_")}
    text = (ROOT / name).read_text("utf-8")
    for number in re.findall(r"exit (?:code )?(\d+)", re.sub(r"ended \(exit code \d+\)", "", text)):
        assert int(number) in known, f"{name}: exit code {number}"


def test_ports_are_the_ports() -> None:
    settings = Settings(model="m")
    ports = Ports.of(settings)
    rows = {row[0]: row[1] for row in table_rows((REFERENCE / "ports.md").read_text("utf-8"))}
    assert rows == {
        "`--port`": str(settings.port),
        "`--port` + i": f"{settings.port}, {settings.port + 1}, ...",
        "`--data-parallel-supervisor-port`": str(settings.data_parallel_supervisor_port),
        "`--management-port`": str(settings.management_port),
        "P": str(ports.handshake),
        "P + 1": str(ports.frontend_stats_publish),
        "P + 2": str(ports.coordinator_input),
        "P + 3": str(ports.coordinator_output),
        "P + 4": str(ports.store),
        "P + 5 to P + 9": f"{ports.rendezvous[0]} to {ports.rendezvous[-1]}",
        "P + 10 + 2i": f"{ports.requests(0)}, {ports.requests(1)}, ...",
        "P + 11 + 2i": f"{ports.outputs(0)}, {ports.outputs(1)}, ...",
        "P + 200 + r": f"{ports.expert_exchange(0)}, {ports.expert_exchange(1)}, ...",
    }
    last = ports.outputs(MAX_API_SERVERS - 1) - ports.handshake
    assert f"the last port is P + {last}." in (REFERENCE / "ports.md").read_text("utf-8")


def test_refusals_of_the_head_are_all_listed() -> None:
    rows = table_rows(section(REFERENCE / "protocol.md", "Refusals"))
    assert {row[0].strip("`") for row in rows} == {r.value for r in Refusal}


def test_lease_times_are_the_times() -> None:
    rows = {row[0]: row[1] for row in table_rows(section(REFERENCE / "protocol.md", "Lease and epochs"))}
    t = LeaseTimings()
    assert list(rows.values()) == [
        *(f"{v:g}" for v in (t.beat, t.beat, t.suspect, t.lost, t.loading)),
        f"{t.step_suspect:g}, {t.step_lost:g}",
    ]
    assert f"Wire version: {WIRE_VERSION}." in (REFERENCE / "protocol.md").read_text("utf-8")


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("name", NAMES)
def test_metrics_exist(name: str) -> None:
    known = {m.name for m in (*metrics_table.METRICS, *metrics_table.POD_METRICS)} | {"dpi_engine", "dpi_operator"}
    known |= {f.name + ("_total" if f.type == "counter" else "") for f in REGISTRY.collect()}
    for found in re.findall(r"\b(?:vllm:[a-z]|dpi_[a-z])\w+", (ROOT / name).read_text("utf-8")):
        assert found in known, f"{name}: {found}"


# --------------------------------------------------------------------------------------------------------------- HTTP


def _routes(rows: list[list[str]]) -> set[tuple[str, str]]:
    found = set()
    for row in rows:
        method, _, path = row[0].strip("`").partition(" ")
        found.add((method, path))
    return found


def test_http_routes_are_all_listed() -> None:
    app = make_app(echo_client(), Bundle(), options(dev_endpoints=True))
    served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.method != "HEAD" and r.resource}
    listed = _routes(table_rows(section(REFERENCE / "http-api.md", "Routes")))
    assert listed == served
    assert {(method, path) for method, path, _ in DEV_ROUTES} <= listed


def _launcher() -> Launcher:
    return Launcher(parse_serve(["m"]), PodIdentity(), None)


def test_management_routes_are_all_listed() -> None:
    app = make_management_app(_launcher(), None)
    served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.method != "HEAD" and r.resource}
    text = (REFERENCE / "management-api.md").read_text("utf-8").partition("## GET /ranks")[0]
    assert _routes(table_rows(text)) == served


def test_the_ranks_document_is_described() -> None:
    first, _, second = section(REFERENCE / "management-api.md", "GET /ranks").partition("Each rank:")
    assert {row[0].strip("`") for row in table_rows(first)} == set(_launcher().ranks())
    assert {row[0].strip("`") for row in table_rows(second)} == set(RankInfo.__struct_fields__)
    states = section(DOCS / "how-to" / "monitor.md", "A look")
    assert {s for row in table_rows(states) for s in row[0].split(", ")} == set(RankState)


def test_callable_methods_are_all_listed() -> None:
    rows = table_rows(section(REFERENCE / "management-api.md", "POST /utility/{method}"))
    assert {word for row in rows for word in spans(row[0])} == utility.ALLOWED_METHODS


def test_request_fields_are_all_listed() -> None:
    text = section(REFERENCE / "http-api.md", "Request fields")
    listed = {word for row in table_rows(text) for word in spans(row[0])}
    assert listed == {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    refused = spans(text.partition("unless their value asks for nothing:")[2].partition("and `echo` in chat")[0])
    assert set(refused) | {"echo"} == {*refusals._COMPLETION, *refusals._CHAT}


def _literals(node: ast.expr | None) -> set[str]:
    if isinstance(node, ast.IfExp):
        return _literals(node.body) | _literals(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def _codes_in(file: Path) -> set[str]:
    """Third argument or `code` of every error that the file makes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("ApiError", "bad_request"):
            continue
        if getattr(node.func, "id", "") == "bad_request" and len(node.args) > 2:
            found |= _literals(node.args[2])
        for keyword in node.keywords:
            found |= _literals(keyword.value) if keyword.arg == "code" else set()
    return found


def _engine_errors(kind: type[EngineError]) -> set[str]:
    return {kind.code}.union(*(_engine_errors(sub) for sub in kind.__subclasses__() if "dpi_engine" in sub.__module__))


def test_error_codes_are_all_listed() -> None:
    assert events.ClientClosed.code and utility.UtilityTimeout.code  # loaded, so that they are among the subclasses
    rows = table_rows(section(REFERENCE / "http-api.md", "Errors"))
    listed = {word for row in rows for word in spans(row[1])}
    made = set().union(*(_codes_in(file) for file in (ENGINE / "server").rglob("*.py")))
    assert listed == made | _engine_errors(EngineError)


# ----------------------------------------------------------------------------------------------------------- manifest


def test_the_page_of_manifest_fields_is_generated() -> None:
    page = REFERENCE / "manifest.md"
    assert page.read_text("utf-8") == manifest_docs.render(), f"run: python -m dpi_operator.api.docs {page}"


def test_every_manifest_field_is_explained() -> None:
    for row in manifest_docs.rows():
        assert row.description.endswith("."), row.path


@pytest.mark.parametrize("name", NAMES)
def test_manifest_paths_in_the_text_exist(name: str) -> None:
    known = {row.path for row in manifest_docs.rows()}
    for span in code_spans(ROOT / name):
        for path in re.findall(r"\bspec\.[a-z]\w*(?:\.\w+)+", span):
            if path.split(".")[1] in {p.split(".")[1].removesuffix("[]") for p in known}:
                assert path in known or path.split(".{")[0] in known, f"{name}: {path}"


# ----------------------------------------------------------------------------------------------------------- messages


def _texts() -> str:
    """All string literals of the code, line by line; what is filled in at run time is a NUL."""
    texts: list[str] = []
    for file in [*ENGINE.rglob("*.py"), *(ROOT / "operator").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_in_troubleshooting_are_messages_of_the_code() -> None:
    """Of each quoted message every run of three plain words stands in one literal of the code."""
    system = [os.strerror(errno.EADDRINUSE), os.strerror(errno.EADDRNOTAVAIL), "Name or service not known"]
    corpus = "\n".join([_texts(), *system, *map(str.lower, system)])
    checked, unknown = 0, []
    for row in table_rows((DOCS / "troubleshooting.md").read_text("utf-8")):
        for span in re.findall(r"`+ ?([^`]+?) ?`+", row[0]):
            for run in re.split(r"\.\.\.|tcp:|\b[A-Z]\b|[^A-Za-z \-]", span):
                words = run.split()
                threes = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
                checked += len(threes)
                unknown += [(span, three) for three in threes if three not in corpus]
    assert not unknown
    assert checked > 50
