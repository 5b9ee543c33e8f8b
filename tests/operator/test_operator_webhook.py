"""The validating webhook: the reconciler's judgement over HTTPS, also as a real API server asks for it."""

import asyncio
import base64
import contextlib
import json
import ssl
import subprocess
import threading

import aiohttp
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_world import World, document
from test_operator_service import cluster, operator, until

from api_server import kubectl, needs_api_server
from dpi_operator.api.crd import manifest
from dpi_operator.handlers import webhook
from dpi_operator.handlers.service import EXIT_FAILED, Options, run
from dpi_operator.handlers.webhook import BadReview, answer, serving
from free_ports import PORTS

DOMAIN = "cluster.local"
BAD = [
    ({"parallelism": {"dataParallelSize": 3, "dataParallelSizeLocal": 2}}, "dataParallelSizeLocal"),
    ({"engine": {"args": ["--port", "1"]}}, "ReservedFlag: spec.engine.args: --port"),
    ({"engine": {"args": ["--no-such-flag"]}}, "--no-such-flag"),
    ({"engine": {"args": ["--help"]}}, "InvalidSpec: spec.engine.args: --help"),
    ({"engine": {"args": ["--config", "/etc/hostname"]}}, "NotSupported: spec.engine.args: --config"),
    ({"engine": {"surprise": 1}}, "there is no field `surprise`"),
    ({"rollout": {"maxSurge": "many"}}, "spec.rollout"),
    ({"rankOverrides": [{"ranks": "1", "args": ["--seed", "7"]}]}, "FingerprintMismatch: spec.rankOverrides: rank 1"),
    ({"template": {"spec": {"hostname": "x"}}}, "spec.template.spec.hostname"),
    ({"scheduling": {"gang": {"provider": "Kueue"}}}, "spec.scheduling.gang.queue"),
]


def review(doc, operation="CREATE", old=None, **request):
    kind = {"group": "dpinference.dev", "version": "v1alpha1", "kind": "DataParallelInference"}
    base = {"uid": "u1", "kind": kind, "operation": operation, "namespace": "ns", "object": doc, "oldObject": old}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**base, **request}}


def judged(*args, **kwargs):
    return answer(review(*args, **kwargs), DOMAIN)["response"]


@pytest.mark.parametrize(("spec", "words"), BAD)
def test_it_refuses_what_the_reconciler_refuses(spec, words):
    response = judged(document(**spec))
    assert response["allowed"] is False and response["uid"] == "u1"
    assert response["status"]["code"] == 422 and words in response["status"]["message"]
    world = World(document(**spec))
    world.settle()
    assert "False" in (world.condition("Accepted").status, world.condition("ConfigConsistent").status)
    assert not world.pods


def test_it_lets_everything_else_through():
    good, bad = document(), document(**BAD[0][0])
    assert judged(good) == {"uid": "u1", "allowed": True}
    assert judged(bad, "UPDATE", old=good)["allowed"] is False
    assert judged(good, "UPDATE", old=bad)["allowed"] is True
    labelled = {**bad, "metadata": {**bad["metadata"], "labels": {"a": "b"}}}
    assert judged(labelled, "UPDATE", old=bad)["allowed"] is True  # its spec is as it was
    going = {**bad, "metadata": {**bad["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert judged(going, "UPDATE", old=good)["allowed"] is True
    assert judged(None, "DELETE", old=bad)["allowed"] is True
    generated = {**good, "metadata": {"generateName": "demo-"}}
    assert judged(generated)["allowed"] is True
    assert "metadata.name" in judged({**good, "metadata": {"generateName": "x" * 38}})["status"]["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(json_values)
def test_no_request_breaks_it(value):
    with contextlib.suppress(BadReview):
        answer(value, DOMAIN)
    for part in ("object", "oldObject", "operation", "namespace"):
        assert isinstance(answer(review(document(), **{part: value}), DOMAIN)["response"]["allowed"], bool)
    with contextlib.suppress(BadReview):
        answer(review(document(), kind=value), DOMAIN)
    spec = answer(review({**document(), "spec": value}), DOMAIN)["response"]
    assert spec["allowed"] is False


def certificate(folder, name="127.0.0.1"):
    """A self-signed certificate for loopback. Its text."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"), "-days", "1",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return (folder / "tls.crt").read_text()


async def ask(port, trusted, body):
    context = ssl.create_default_context(cadata=trusted)
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(f"https://127.0.0.1:{port}/validate", data=data, ssl=context) as response:
            return response.status, await response.text()


def test_it_answers_over_https_and_takes_a_renewed_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "LOOK_S", 0.05)

    async def main():
        first = certificate(tmp_path / "tls")
        async with serving(0, tmp_path / "tls", DOMAIN) as port:
            status, text = await ask(port, first, review(document(**BAD[0][0])))
            assert status == 200 and json.loads(text)["response"]["allowed"] is False
            assert (await ask(port, first, b"no json"))[0] == 400
            assert (await ask(port, first, {"request": 1}))[0] == 400
            assert (await ask(port, first, b"[" * 200_000))[0] == 400
            assert (await ask(port, first, b" " * (webhook.MAX_BODY + 1)))[0] == 413
            other = certificate(tmp_path / "other")
            for broken in ("half written", other):  # no certificate, then one of another key
                (tmp_path / "tls/tls.crt").write_text(broken)
                for _ in range(3):
                    assert (await ask(port, first, review(document())))[0] == 200
                    await asyncio.sleep(0.1)
            second = certificate(tmp_path / "tls")
            taken = []

            async def renewed():
                with contextlib.suppress(aiohttp.ClientError):
                    taken.append((await ask(port, second, review(document())))[0])

            for _ in range(2400):
                await renewed()
                if taken:
                    break
                await asyncio.sleep(0.05)
            assert taken == [200]
            with pytest.raises(aiohttp.ClientError):
                await ask(port, first, review(document()))

    asyncio.run(main())


def test_a_standby_serves_it_too(tmp_path, monkeypatch):
    async def answers(port, trusted):
        try:
            return (await ask(port, trusted, review(document())))[0] == 200
        except aiohttp.ClientError:
            return False

    async def main():
        trusted = certificate(tmp_path / "tls")
        ports = [PORTS.take(1), PORTS.take(1)]
        async with contextlib.AsyncExitStack() as stack:
            model, _ = await stack.enter_async_context(cluster())
            for port in ports:
                options = {"webhook_port": port, "webhook_certificates": tmp_path / "tls"}
                await stack.enter_async_context(operator(model, tmp_path, monkeypatch, **options))
            for port in ports:
                for _ in range(2400):
                    if served := await answers(port, trusted):
                        break
                    await asyncio.sleep(0.05)
                assert served, port
            await until(lambda: model.all("Lease"), "the lease")

    asyncio.run(main())


def test_without_a_certificate_it_says_where_it_looked(tmp_path, monkeypatch, caplog):
    async def main():
        async with cluster() as (model, _):
            model.use(tmp_path, monkeypatch)
            return await run(Options(metrics_port=0, webhook_port=0, webhook_certificates=tmp_path / "nowhere"))

    assert asyncio.run(main()) == EXIT_FAILED
    assert "tls.crt and tls.key" in caplog.text and "nowhere" in caplog.text


@contextlib.contextmanager
def served_in_a_thread(folder):
    """The webhook beside a test that calls blocking programs. Its port."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    async def body(stop):
        async with serving(0, folder, DOMAIN) as number:
            port.append(number)
            ready.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(body(stop)), daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield port[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()


@needs_api_server
def test_a_real_api_server_asks_it(tmp_path):
    trusted, space = certificate(tmp_path / "tls"), "dpi-webhook-test"
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", document=yaml.safe_dump(manifest()))
    kubectl("wait", "--for=condition=Established", "crd", manifest()["metadata"]["name"], "--timeout=120s")
    kubectl("create", "namespace", space)

    def create(spec, check=False):
        doc = document(**spec)
        doc["metadata"] = {"name": "demo", "namespace": space}
        return kubectl("apply", "-f", "-", document=json.dumps(doc), check=check)

    unknown_flag = {"engine": {"args": ["--no-such-flag"]}}  # nothing that CEL could know
    with served_in_a_thread(tmp_path / "tls") as port:
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": space},
            "webhooks": [
                {
                    "name": "validate.dpinference.dev",
                    "clientConfig": {
                        "url": f"https://127.0.0.1:{port}/validate",
                        "caBundle": base64.b64encode(trusted.encode()).decode(),
                    },
                    "rules": [
                        {
                            "apiGroups": ["dpinference.dev"],
                            "apiVersions": ["v1alpha1"],
                            "operations": ["CREATE", "UPDATE"],
                            "resources": ["dataparallelinferences"],
                        }
                    ],
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}},
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "timeoutSeconds": 5,
                    "failurePolicy": "Fail",
                }
            ],
        }
        create(unknown_flag, check=True)  # before there is a webhook
        kubectl("apply", "-f", "-", document=json.dumps(configuration))
        try:
            for _ in range(100):  # the API server takes a moment to know of it
                refused = create({"engine": {"args": ["--another"]}})
                if refused.returncode:
                    break
            assert refused.returncode and "InvalidSpec" in refused.stderr and "--another" in refused.stderr
            kubectl("label", "dpi", "demo", "-n", space, "team=x")  # a bad object may be labelled and may go
            create({}, check=True)
            kubectl("scale", "dpi", "demo", "-n", space, "--replicas=2")
            kubectl("delete", "dpi", "demo", "-n", space, "--timeout=120s")
        finally:
            kubectl("delete", "validatingwebhookconfiguration", space)
            kubectl("delete", "namespace", space, "--wait=false")
