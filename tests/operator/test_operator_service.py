"""The running operator against an API: from an object to Ready, restarts, cut watches, a slow and an absent API."""

import asyncio
import contextlib
import time

import pytest
import yaml
from api_model import ApiModel
from operator_world import document

from dpi_engine.cli import main as dpi
from dpi_engine.launch.exit_codes import EXIT_USAGE
from dpi_operator.__main__ import main as operator_main
from dpi_operator.apply import refusals
from dpi_operator.apply.client import Api
from dpi_operator.apply.events import Events
from dpi_operator.apply.executor import Executor
from dpi_operator.apply.optional import OptionalKinds
from dpi_operator.handlers import lease as lease_module
from dpi_operator.handlers import workers as workers_module
from dpi_operator.handlers.lease import Lease, LeaseLost
from dpi_operator.handlers.service import EXIT_FAILED, Options, run
from dpi_operator.plan.times import to_text

WAIT_S = 300.0
"""Seconds until a test gives up on what must happen: a bound for what hangs, far beyond what a loaded machine takes."""

REST_S = 2.0


async def until(condition, what, timeout=WAIT_S):
    """Poll until the condition holds; the last thing it saw is in the failure."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := condition():
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {timeout:.0f} s: {what}")


async def at_rest(model, what):
    """Until nothing has been written for REST_S; fails when something always is."""
    end = time.monotonic() + WAIT_S
    seen = -1
    while seen != len(model.writes()):
        seen = len(model.writes())
        assert time.monotonic() < end, f"still writes after {WAIT_S:.0f} s: {what}: {model.writes()[-5:]}"
        await asyncio.sleep(REST_S)


class Kubelet:
    """Makes pods run and become ready, rank 0 last; ends pods that were told to fail."""

    def __init__(self, model):
        self.model = model
        self.broken = set()

    async def run(self):
        while True:
            for pod in self.model.all("Pod"):
                name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
                phase = (pod.get("status") or {}).get("phase")
                if phase is None:
                    running = {"name": "engine", "state": {"running": {"startedAt": to_text(time.time())}}}
                    self.model.set_status(
                        "Pod",
                        name,
                        {
                            "phase": "Running",
                            "conditions": [
                                {"type": "PodScheduled", "status": "True"},
                                {"type": "Ready", "status": "True", "lastTransitionTime": to_text(time.time())},
                            ],
                            "containerStatuses": [running],
                        },
                        namespace,
                    )
            await asyncio.sleep(0.02)

    def kill(self, name):
        ended = {"exitCode": 137, "reason": "Error", "message": "killed", "finishedAt": to_text(time.time())}
        self.model.set_status(
            "Pod",
            name,
            {
                "phase": "Failed",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [{"name": "engine", "state": {"terminated": ended}}],
            },
        )


@contextlib.asynccontextmanager
async def operator(model, tmp_path, monkeypatch, **options):
    """The operator in this process. Its ports are free ones, and it keeps its lease on a machine that starves it."""
    monkeypatch.setattr(lease_module, "DURATION_S", 4 * WAIT_S)
    model.use(tmp_path, monkeypatch)
    stop = asyncio.Event()
    task = asyncio.create_task(run(Options(metrics_port=0, **options), stop))
    try:
        yield task
        assert not task.done(), "the operator ended by itself"
    finally:
        stop.set()
        async with asyncio.timeout(WAIT_S):
            assert await task == 0


@contextlib.asynccontextmanager
async def cluster():
    model = ApiModel()
    await model.start()
    kubelet = Kubelet(model)
    task = asyncio.create_task(kubelet.run())
    try:
        yield model, kubelet
    finally:
        task.cancel()
        await model.stop()


def condition(model, kind, name="demo"):
    found = ((model.get("DataParallelInference", name) or {}).get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {"status": "absent", "reason": "", "message": ""})


def ready(model, name="demo"):
    return condition(model, "Ready", name)["status"] == "True"


@pytest.mark.parametrize("refused", ["GET leases", "GET dataparallelinferences"])
def test_an_api_server_that_does_not_know_the_roles_yet_is_asked_again(tmp_path, monkeypatch, refused):
    async def main():
        async with cluster() as (model, _):
            model.refuse[refused] = (403, 'leases is forbidden: role "dpi-operator" not found')
            async with operator(model, tmp_path, monkeypatch):
                method, plural = refused.split()
                await until(lambda: any(m == method and plural in p for m, p in model.calls), "asked")
                del model.refuse[refused]
                model.put(document())
                await until(lambda: ready(model), "Ready")

    asyncio.run(main())


@pytest.mark.parametrize("refused", ["GET leases", "GET dataparallelinferences"])
def test_an_account_without_the_rights_ends_the_operator(tmp_path, monkeypatch, caplog, refused):
    monkeypatch.setattr(refusals, "REFUSED_S", 1.0)

    async def main():
        async with cluster() as (model, _):
            model.refuse[refused] = (403, "leases is forbidden for this account")
            model.use(tmp_path, monkeypatch)
            async with asyncio.timeout(WAIT_S):
                assert await run(Options(metrics_port=0), asyncio.Event()) == EXIT_FAILED
            assert "is forbidden for this account" in caplog.text

    asyncio.run(main())


def test_an_object_becomes_ready_heals_and_goes(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, kubelet), operator(model, tmp_path, monkeypatch):
            model.put(document(failurePolicy={"backoff": {"baseSeconds": 1}}))
            await until(lambda: ready(model), "Ready")
            pods = [p["metadata"]["name"] for p in model.all("Pod")]
            assert len(pods) == 2
            assert model.get("Service", "demo-internal")["spec"]["publishNotReadyAddresses"] is True
            assert not model.get("DataParallelInference", "demo")["metadata"].get("finalizers")
            assert not model.get("DataParallelInference", "demo")["metadata"].get("annotations")

            old = model.get("Pod", pods[1])["metadata"]["uid"]
            kubelet.kill(pods[1])
            await until(
                lambda: (p := model.get("Pod", pods[1])) is not None and p["metadata"]["uid"] != old, "a new pod"
            )
            await until(lambda: ready(model) and condition(model, "Degraded")["status"] == "False", "healed")
            assert "killed" in model.get("ConfigMap", "demo-state")["data"]["state.json"]

            def told():
                return [e for e in model.all("Event") if e["reason"] == "RankReplaced"]

            both = {"DataParallelInference", "Pod"}
            await until(lambda: {e["involvedObject"]["kind"] for e in told()} == both, "events of both")
            assert all(e["reportingComponent"] == "dpi-operator" for e in told())

            model.remove("Service", "demo")
            await until(lambda: model.get("Service", "demo"), "the Service again")

            await at_rest(model, "an object that is well")

            model.remove("DataParallelInference", "demo")
            await at_rest(model, "an object that is gone")
            assert not model.all("Pod")
            assert not model.all("Service")

    asyncio.run(main())


def test_a_restart_of_the_operator_changes_nothing_and_finishes_what_was_begun(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _):
            async with operator(model, tmp_path, monkeypatch):
                model.put(document(replicas=2))
                await until(lambda: ready(model), "Ready")
                await at_rest(model, "the first operator")
            before = {p["metadata"]["uid"] for p in model.all("Pod")}
            calls, asked = len(model.writes()), len(model.calls)
            async with operator(model, tmp_path, monkeypatch):
                await until(lambda: any("/pods" in p for _, p in model.calls[asked:]), "a look at the pods")
                await asyncio.sleep(1.5)
                assert model.writes()[calls:] == []
                assert {p["metadata"]["uid"] for p in model.all("Pod")} == before
            document_ = document(replicas=2, engine={"image": "engine:2"})
            model.put(document_)
            async with operator(model, tmp_path, monkeypatch):
                await until(
                    lambda: (
                        {p["spec"]["containers"][0]["image"] for p in model.all("Pod")} == {"engine:2"}
                        and condition(model, "Progressing")["reason"] == "RolloutComplete"
                    ),
                    "the new image",
                )

    asyncio.run(main())


def test_the_api_may_be_slow_cut_its_watches_or_be_away(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.put(document())
            await until(lambda: ready(model), "Ready")
            model.cut_watches()
            model.put(document(replicas=2))
            await until(lambda: len(model.all("Pod")) == 4, "two groups after the watches were cut")
            model.delay = 0.2
            model.put(document(replicas=3))
            await until(lambda: len(model.all("Pod")) == 6, "three groups through a slow API")
            model.delay = 0.0
            model.away = True
            model.cut_watches()
            await asyncio.sleep(2)
            model.away = False
            model.put(document(replicas=1))
            await until(lambda: len(model.all("Pod")) == 2, "one group after the API was away")

    asyncio.run(main())


def test_what_the_api_refuses_is_in_the_status_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.5)

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.refuse["POST pods"] = (403, "pods is forbidden: exceeded quota: compute, used: pods=2")
            model.put(document())
            await until(lambda: condition(model, "Scheduled")["reason"] == "QuotaExceeded", "the refusal in the status")
            assert "exceeded quota: compute" in condition(model, "Ready")["message"]
            model.refuse.clear()
            await until(lambda: ready(model), "Ready once there is room")

    asyncio.run(main())


def test_a_strangers_service_is_reported_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.5)

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            stranger = {"kind": "Service", "metadata": {"name": "demo", "namespace": "ns"}, "spec": {"a": 1}}
            model.put(stranger)
            model.put(document())
            await until(lambda: condition(model, "Accepted")["reason"] == "NameTaken", "NameTaken")
            assert model.get("Service", "demo")["spec"] == {"a": 1}
            model.remove("Service", "demo")
            await until(lambda: ready(model), "Ready once the name is free")

    asyncio.run(main())


def stranger(kind, name):
    return {"kind": kind, "metadata": {"name": name, "namespace": "ns"}}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Service", "demo"), ("Service", "demo-internal"), ("ConfigMap", "demo-state"), ("ServiceAccount", "demo-engine")],
)
def test_while_a_name_is_taken_no_pod_is_made_and_nothing_is_written(tmp_path, monkeypatch, kind, name):
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.2)
    monkeypatch.setattr(workers_module, "LAST_FOREIGN_S", 0.4)  # it is looked at again many times in this test

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.put(stranger(kind, name))
            model.put(document())
            await until(lambda: condition(model, "Accepted")["reason"] == "NameTaken", "NameTaken")
            await at_rest(model, "an object whose name is taken")
            asked, written = len(model.calls), len(model.writes())

            def looks():
                return [c for c in model.calls[asked:] if c[0] == "GET" and c[1].endswith(f"s/{name}")]

            await until(lambda: len(looks()) > 5, "the name is asked for again")
            assert model.writes()[written:] == []
            accepted = condition(model, "Accepted")
            assert (accepted["status"], accepted["reason"]) == ("False", "NameTaken")
            assert f"{kind} {name}" in accepted["message"]
            assert condition(model, "Ready")["status"] == "False"
            assert not [c for c in model.calls if c[0] == "POST" and c[1].endswith("/pods")]
            assert "GroupCreated" not in {e["reason"] for e in model.all("Event")}
            model.remove(kind, name)
            await until(lambda: ready(model), "Ready once the name is free")
            assert condition(model, "Accepted")["status"] == "True"

    asyncio.run(main())


def test_a_taken_name_leaves_alone_what_runs_also_after_a_restart(tmp_path, monkeypatch):
    """Pods that run are ours to the next operator too, and are looked after."""
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.2)

    async def main():
        async with cluster() as (model, kubelet):
            async with operator(model, tmp_path, monkeypatch):
                model.put(document(failurePolicy={"backoff": {"baseSeconds": 1}}))
                await until(lambda: ready(model), "Ready")
            model.remove("Service", "demo")
            model.put(stranger("Service", "demo"))
            before = {p["metadata"]["name"]: p["metadata"]["uid"] for p in model.all("Pod")}
            async with operator(model, tmp_path, monkeypatch):
                await until(lambda: condition(model, "Accepted")["reason"] == "NameTaken", "NameTaken")
                assert condition(model, "Accepted")["message"].startswith("Service demo: exists")
                assert {p["metadata"]["name"]: p["metadata"]["uid"] for p in model.all("Pod")} == before
                ended = max(before)
                kubelet.kill(ended)
                await until(
                    lambda: (p := model.get("Pod", ended)) is not None and p["metadata"]["uid"] != before[ended],
                    "a new pod in place of the one that ended",
                )
                assert condition(model, "Accepted")["message"].startswith("Service demo: exists")

    asyncio.run(main())


def test_a_pod_that_took_a_name_and_became_ours_is_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.2)

    async def main():
        async with cluster() as (model, _):
            async with operator(model, tmp_path, monkeypatch):
                model.put(document())
                await until(lambda: ready(model), "Ready")
                mine = model.all("Pod")[0]
                name = mine["metadata"]["name"]
            model.remove("Pod", name)
            model.put({"kind": "Pod", "metadata": {"name": name, "namespace": "ns"}})
            async with operator(model, tmp_path, monkeypatch):
                await until(lambda: f"Pod {name}" in condition(model, "Accepted")["message"], "NameTaken")
                await at_rest(model, "an object of which a pod's name is taken")
                model.remove("Pod", name)
                model.put({k: v for k, v in mine.items() if k != "status"})
                await until(lambda: condition(model, "Accepted")["status"] == "True", "the pod is ours")
                await until(lambda: ready(model), "Ready")

    asyncio.run(main())


def test_workers_stop_also_when_they_are_marked_at_that_moment(tmp_path, monkeypatch):
    """What is heard in the same turn of the loop as the stop must not outlive it (`asyncio.wait_for` would let it)."""

    async def main():
        async with cluster() as (model, _):
            model.use(tmp_path, monkeypatch)
            model.put(document())
            async with operator(model, tmp_path, monkeypatch):
                await until(lambda: ready(model), "Ready")
                await at_rest(model, "a ready object")
            api = await Api.connect(5)
            try:
                for turns in range(6):
                    workers = workers_module.Workers(
                        api, Executor(api, Events(api, "me")), OptionalKinds(api, ()), resync_s=600
                    )
                    began = workers.last_success
                    workers.mark(("ns", "demo"))
                    await until(lambda w=workers, b=began: w.last_success != b, "it looked at the object")
                    workers.mark(("ns", "demo"))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    async with asyncio.timeout(0.9 * workers_module.STOP_AGAIN_S):
                        await workers.stop()
            finally:
                await api.close()

    asyncio.run(main())


def delete_crd(model):
    """As the API server does it: the objects go, then the path, and the watches of it end."""
    for item in model.all("DataParallelInference"):
        model.remove("DataParallelInference", item["metadata"]["name"])
    model.gone.add("DataParallelInference")
    model.cut_watches()


def test_a_crd_that_is_deleted_and_put_back_is_watched_again(tmp_path, monkeypatch, caplog):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.put(document())
            await until(lambda: ready(model), "Ready")
            for number in range(2):
                delete_crd(model)
                await until(lambda n=number: told("the cluster does not know") == n + 1, "it waits for the CRD")
                await asyncio.sleep(3)  # asks several times meanwhile
                assert told("the cluster does not know") == number + 1
                model.gone.clear()
                await until(lambda n=number: told("the cluster knows") == n + 1, "it knows that the CRD is back")
                again = document()
                again["metadata"]["uid"] = f"uid-of-life-{number}"
                model.put(again)
                await until(lambda: ready(model), "Ready after the CRD was put back")
                await until(lambda: any(w[0] == "dataparallelinferences" for w in model.watchers), "a watch")
                model.put({**again, "spec": {**again["spec"], "replicas": 2}})
                await until(lambda: len(model.all("Pod")) == 4, "a change is heard")

    def told(text):
        return sum(text in r.getMessage() for r in caplog.records)

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert not [r for r in caplog.records if r.exc_info and r.name.partition(".")[0] in ("kopf", "dpi_operator")]
    assert not told("OS signals are ignored")


def test_a_crd_that_is_back_before_anyone_looked_is_watched_again(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.put(document())
            await until(lambda: ready(model), "Ready")
            await until(lambda: any(w[0] == "dataparallelinferences" for w in model.watchers), "a watch")
            asked = model.refused
            model.refuse_watch["dataparallelinferences"] = (404, "the server could not find the requested resource")
            model.cut_watches()
            await until(lambda: model.refused > asked, "a watch that was refused")
            model.refuse_watch.clear()
            model.put(document(replicas=2))
            await until(lambda: len(model.all("Pod")) == 4, "a change is heard")
            await until(lambda: any(w[0] == "dataparallelinferences" for w in model.watchers), "a watch")

    asyncio.run(main())


@pytest.mark.parametrize("plural", ["pods", "dataparallelinferences"])
def test_watches_that_end_for_another_reason_end_the_process(tmp_path, monkeypatch, plural):
    """The exit code is not 0 and the lease is let go, so that a standby goes on."""

    async def main():
        async with cluster() as (model, _):
            model.use(tmp_path, monkeypatch)
            task = asyncio.create_task(run(Options(metrics_port=0), asyncio.Event()))
            await until(lambda: any(w[0] == plural for w in model.watchers), "a watch")
            for watcher in model.watchers:
                if watcher[0] == plural:
                    watcher[3].put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 500}})
            async with asyncio.timeout(WAIT_S):
                assert await task == 1
            assert model.all("Lease")[0]["spec"]["holderIdentity"] == ""

    asyncio.run(main())


@pytest.fixture
def quick_lease(monkeypatch):
    monkeypatch.setattr(lease_module, "DURATION_S", 6)
    monkeypatch.setattr(lease_module, "RENEW_S", 0.3)
    monkeypatch.setattr(lease_module, "RETRY_S", 0.2)


def test_one_operator_leads_and_a_standby_takes_over(tmp_path, monkeypatch, quick_lease):
    async def main():
        async with cluster() as (model, _):
            model.use(tmp_path, monkeypatch)
            api = await Api.connect()
            first, second = (Lease(api, "ns", "lease", who) for who in ("first", "second"))
            await first.acquire()
            holding = asyncio.create_task(first.hold())
            waiting = asyncio.create_task(second.acquire())
            await asyncio.sleep(8)  # longer than a lease that is not renewed
            assert not waiting.done()
            holding.cancel()  # the first one froze
            async with asyncio.timeout(WAIT_S):
                await waiting
            with pytest.raises(LeaseLost, match="second"):
                await first.hold()
            await second.release()
            async with asyncio.timeout(WAIT_S):
                await first.acquire()
            model.away = True
            with pytest.raises(LeaseLost, match="not renewed"):
                await first.hold()
            await api.close()

    asyncio.run(main())


def test_many_objects_at_once(tmp_path, monkeypatch):
    """Every one gets its pods; afterwards nothing is written any more."""

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch, workers=8):
            for i in range(40):
                one = document()
                one["metadata"].update(name=f"demo{i}", uid=f"uid-of-{i}")
                model.put(one)
            await until(lambda: all(ready(model, f"demo{i}") for i in range(40)), "all Ready", 240)
            await at_rest(model, "forty objects that are well")
            assert len(model.all("Pod")) == 80

    asyncio.run(main())


# -- commands that ask a cluster ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["-n", "ns"]])
def test_a_command_asks_in_the_namespace_of_the_context(flags, tmp_path, monkeypatch, capsys):
    async def main():
        async with cluster() as (model, _):
            model.put(document())
            found = model.kubeconfig()
            for entry in found["contexts"]:
                entry["context"]["namespace"] = "elsewhere" if flags else "ns"
            config = tmp_path / "kubeconfig"
            config.write_text(yaml.safe_dump(found))
            monkeypatch.setenv("KUBECONFIG", str(config))
            assert await asyncio.to_thread(dpi, ["status", "demo", *flags]) == 0
            assert await asyncio.to_thread(dpi, ["status", "nobody", *flags]) == 1

    asyncio.run(main())
    told = capsys.readouterr()
    assert told.out.startswith("ns/demo  not seen by an operator yet")
    assert "there is no DataParallelInference ns/nobody" in told.err


CLUSTER = {"cluster": {"server": "https://127.0.0.1:1", "certificate-authority-data": "bm90aGluZw=="}, "name": "c"}
CONTEXT = {"context": {"cluster": "c", "user": "u"}, "name": "x"}


@pytest.mark.parametrize("command", ["status", "rollback"])
@pytest.mark.parametrize(
    "text",
    [
        ": : {",
        "- 1",
        "words",
        "",
        "\x00",
        yaml.safe_dump({"current-context": "x", "contexts": 5}),
        yaml.safe_dump({"current-context": "x", "contexts": [CONTEXT], "clusters": [CLUSTER], "users": []}),
        yaml.safe_dump(
            {"current-context": "x", "contexts": [CONTEXT], "clusters": [CLUSTER], "users": [{"name": "u", "user": {}}]}
        ),
    ],
)
def test_a_kubeconfig_that_is_none_is_named(command, text, tmp_path, monkeypatch, capsys):
    config = tmp_path / "kubeconfig"
    config.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert dpi([command, "demo"]) == 1
    assert f"dpi {command}: no answer: " in (told := capsys.readouterr().err)
    assert "KUBECONFIG" in told


@pytest.mark.parametrize("name", ["dpi/demo", "../demo", "Demo", ""])
def test_a_name_is_one_name(name, capsys):
    assert dpi(["status", name]) == 2
    assert f"expected the name of an object alone, such as smollm2, got {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [("--workers", "0"), ("--api-concurrency", "0"), ("--metrics-port", "99999"), ("--webhook-port", "-1")]
)
def test_numbers_with_which_nothing_would_ever_be_done_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as end:
        operator_main(["run", *flags])
    assert end.value.code == EXIT_USAGE
    assert f"argument {flags[0]}: expected a whole number" in capsys.readouterr().err
