"""The client of the Kubernetes API: which file it reads, and what it makes of a server that is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dpi_operator.apply.client import Api, ApiError
from small_server import http_server

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: mine}}}}]
current-context: x
"""


def test_an_empty_kubeconfig_variable_means_the_usual_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube/config").write_text(KUBECONFIG.format(port=1))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")

    async def namespace() -> str:
        api = await Api.connect()
        await api.close()
        return api.namespace

    assert asyncio.run(namespace()) == "mine"


@pytest.mark.parametrize("answer", ["<html>welcome</html>", "[]", '"ok"'])
def test_a_server_that_answers_something_else_is_an_error_of_the_api(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str
) -> None:
    async def ask() -> None:
        async with http_server(lambda _: answer) as port:
            file = tmp_path / "config"
            file.write_text(KUBECONFIG.format(port=port))
            monkeypatch.setenv("KUBECONFIG", str(file))
            api = await Api.connect()
            try:
                await api.get("Pod", "mine", "one")
            finally:
                await api.close()

    with pytest.raises(ApiError, match="the answer is no object"):
        asyncio.run(ask())
