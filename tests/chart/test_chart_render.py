"""Charts through Helm: lint, every switch, schemas of what comes out, rights."""

import itertools
import json
import re

import pytest
import yaml
from chart_render import ONE, OPERATOR, ROOT, check_object, helm, needs_helm, one, refusal, render

from dpi_operator.__main__ import _parser as program
from dpi_operator.api.crd import manifest
from dpi_operator.api.read import read_document, read_manifest
from dpi_operator.api.validate import validate
from dpi_operator.apply.kinds import KINDS
from dpi_operator.handlers.webhook import PATH
from dpi_operator.plan.names import L_RUNTIME, group_name
from dpi_operator.plan.network import Cluster
from dpi_operator.plan.podmonitor import relabelings
from dpi_operator.plan.pods import plan_group
from dpi_operator.plan.podspec import build_pod

pytestmark = needs_helm

SAMPLE = read_manifest(str(ROOT / "manifests/samples/smollm2.yaml"))

EVERYTHING = {
    "replicaCount": 2,
    "commonLabels": {"team": "ml"},
    "image": {"registry": "registry.example:5000", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "serviceAccount": {"name": "dpi", "annotations": {"a": "b"}},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraArgs": ["--log-level=debug"],
    "podLabels": {"p": "q"},
    "podAnnotations": {"r": "s"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "system-cluster-critical",
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prom"}},
        "engines": {"podMonitor": {"enabled": True, "labels": {"release": "prom"}}},
    },
    "alerts": {"enabled": True, "labels": {"release": "prom"}},
    "dashboards": {"enabled": True, "namespace": "grafana"},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
    "podDisruptionBudget": {"enabled": True},
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}},
    ],
}


@pytest.mark.parametrize("chart", [OPERATOR, ONE], ids=lambda c: c.name)
def test_lint_finds_nothing(chart):
    out = helm("lint", "--strict", str(chart)).stdout
    assert "[ERROR]" not in out and "[WARNING]" not in out, out


INTEGRATIONS = ("inferencePools", "podGroups", "podMonitors")
SWITCHES = {
    "scope": [{}, {"watch": {"scope": "namespaces", "namespaces": ["a", "b"]}}],
    "monitors": [{}, {"metrics": EVERYTHING["metrics"], "alerts": {"enabled": True}, "dashboards": {"enabled": True}}],
    "rbac": [{}, {"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "own"}}],
    "webhook": [{}, {"webhook": {"enabled": True, "certManager": {"enabled": True}}}],
    "crds": [{}, {"crds": {"enabled": False}, "integrations": dict.fromkeys(INTEGRATIONS, False)}],
}


@pytest.mark.parametrize(
    "choice", list(itertools.product(*SWITCHES.values())), ids=lambda c: "".join(map(str, map(bool, c)))
)
def test_every_combination_of_switches_gives_valid_objects(choice):
    values = {k: v for part in choice for k, v in part.items()}
    objects = render(OPERATOR, values)
    for document in objects:
        check_object(document)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(set(keys)) == len(keys)


def test_everything_at_once_gives_valid_objects():
    objects = render(OPERATOR, EVERYTHING)
    for document in objects:
        check_object(document)
    pod = one(objects, "Deployment")["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert container["image"] == "registry.example:5000/dpinference/operator@sha256:" + "0" * 64
    assert container["args"][0] == "run" and container["args"][-1] == "--log-level=debug"
    assert pod["metadata"]["labels"]["p"] == "q" and pod["metadata"]["labels"]["team"] == "ml"
    assert pod["spec"]["serviceAccountName"] == "dpi"
    assert one(objects, "ConfigMap", "rel-extra")
    assert one(objects, "PodDisruptionBudget")["spec"]["minAvailable"] == 1


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"watch": {"scope": "namespaces", "namespaces": ["a", "b"]}}])
def test_the_program_understands_its_arguments(values):
    objects = render(OPERATOR, values)
    container = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    known = program()
    options = known.parse_args(container["args"])
    assert (
        options.metrics_port
        == container["ports"][0]["containerPort"]
        == one(objects, "Service", "rel-dpi-operator-metrics")["spec"]["ports"][0]["port"]
    )
    assert options.namespace == values.get("watch", {}).get("namespaces", [])
    assert options.lease_namespace == "sys"
    defaults = known.parse_args(["run"])
    if not values:  # the chart's defaults are the program's, but for logs and the lease
        for name in ("workers", "api_concurrency", "resync_seconds", "cluster_domain", "metrics_port", "log_level"):
            assert getattr(options, name) == getattr(defaults, name), name


def test_engines_are_found_by_the_labels_and_the_port_that_they_have():
    monitor = one(render(OPERATOR, EVERYTHING), "PodMonitor")["spec"]
    pod = build_pod(SAMPLE, plan_group(SAMPLE, 0, Cluster("smollm2", "ns"), "abc")[1], "abc")
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    endpoint, of_others = monitor["podMetricsEndpoints"]
    assert of_others["relabelings"][0] | {"regex": pod["metadata"]["labels"][L_RUNTIME]} != of_others["relabelings"][0]
    assert of_others["relabelings"][1:] == endpoint["relabelings"] == relabelings()
    assert endpoint["port"] in {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
    named = {r["targetLabel"]: r for r in endpoint["relabelings"]}
    assert re.fullmatch(named["group"]["regex"], pod["metadata"]["name"])[1] == group_name("smollm2", "abc", 0)


def test_selectors_select_the_pods_and_nothing_of_a_release_beside():
    for values in ({}, EVERYTHING):
        objects = render(OPERATOR, values)
        labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        selectors = [
            one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
            one(objects, "Service", "rel-dpi-operator-metrics")["spec"]["selector"],
            one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/instance"] == "rel"


def test_the_crd_is_the_one_of_the_types_and_stays_when_asked():
    crd = one(render(OPERATOR), "CustomResourceDefinition")
    assert crd["spec"] == manifest()["spec"]
    assert crd["metadata"]["name"] == manifest()["metadata"]["name"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    gone = one(render(OPERATOR, {"crds": {"keep": False}}), "CustomResourceDefinition")
    assert not gone["metadata"].get("annotations")


def rules(objects, kind, name="rel-dpi-operator"):
    """{(group, resource): verbs} of one role."""
    found = {}
    for o in objects:
        if o["kind"] == kind and o["metadata"]["name"] == name:
            for rule in o["rules"]:
                for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
                    found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def used_by_the_code():
    """{(group, resource): verbs} that the API client lets through."""
    found = {}
    for kind in KINDS.values():
        found[kind.group, kind.plural] = set(kind.verbs)
        for sub, verbs in kind.subresources:
            found[kind.group, f"{kind.plural}/{sub}"] = set(verbs)
    return found


def test_rights_are_what_the_code_uses():
    objects = render(OPERATOR)
    wanted = used_by_the_code()
    lease = wanted.pop(("coordination.k8s.io", "leases"))
    assert rules(objects, "ClusterRole") == wanted
    assert rules(objects, "Role", "rel-dpi-operator-lease") == {("coordination.k8s.io", "leases"): lease}
    name = next(
        a.removeprefix("--lease-name=")
        for a in one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        if a.startswith("--lease-name=")
    )
    named = [r for o in objects if o["kind"] == "Role" for r in o["rules"] if "resourceNames" in r]
    assert [r["resourceNames"] for r in named] == [[name]]


@pytest.mark.parametrize("switch", sorted({k.switch for k in KINDS.values() if k.switch}))
def test_rights_to_kinds_that_only_some_clusters_have_can_be_withheld(switch):
    part, key = switch.split(".")
    granted = rules(render(OPERATOR), "ClusterRole")
    withheld = rules(render(OPERATOR, {part: {key: False}}), "ClusterRole")
    assert granted.keys() - withheld.keys() == {(k.group, k.plural) for k in KINDS.values() if k.switch == switch}


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"watch": {"scope": "namespaces"}}], ids=["plain", "all", "scoped"])
def test_no_right_is_without_bound(values):
    for o in render(OPERATOR, values):
        for rule in o.get("rules", []):
            assert "*" not in rule["verbs"] + rule["apiGroups"] + rule["resources"]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
            assert not {"nodes", "secrets", "roles", "clusterroles", "pods/exec"} & set(rule["resources"])


def test_a_scoped_operator_has_no_rights_outside_its_namespaces():
    objects = render(OPERATOR, {"watch": {"scope": "namespaces", "namespaces": ["a", "b"]}})
    assert not [o for o in objects if o["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    roles = {
        o["metadata"]["namespace"]
        for o in objects
        if o["kind"] == "Role" and o["metadata"]["name"] == "rel-dpi-operator"
    }
    assert roles == {"a", "b"}
    args = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [a for a in args if a.startswith("--namespace=")] == ["--namespace=a", "--namespace=b"]
    assert rules(objects, "Role") == rules(render(OPERATOR), "ClusterRole")


CA = "LS0tLS1CRUdJTi4uLg=="


def test_the_webhook_leads_to_the_operator_by_a_name_that_its_certificate_has():
    objects = render(OPERATOR, {"webhook": {"enabled": True, "certManager": {"enabled": True}}})
    service = one(objects, "Service", "rel-dpi-operator-webhook")
    deployment = one(objects, "Deployment")["spec"]["template"]
    container = deployment["spec"]["containers"][0]
    assert service["spec"]["selector"].items() <= deployment["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": 9443} in container["ports"]
    options = program().parse_args(container["args"])
    assert options.webhook_port == 9443
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == str(options.webhook_certificates)]
    (volume,) = [v for v in deployment["spec"]["volumes"] if v["name"] == mount["name"]]
    certificate = one(objects, "Certificate")
    assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
    (hook,) = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    called = hook["clientConfig"]["service"]
    assert (called["name"], called["namespace"], called["port"]) == (service["metadata"]["name"], "sys", port["port"])
    assert called["path"] == PATH
    assert f"{called['name']}.sys.svc" in certificate["spec"]["dnsNames"]
    assert certificate["spec"]["issuerRef"] == {"kind": "Issuer", "name": one(objects, "Issuer")["metadata"]["name"]}
    annotations = one(objects, "ValidatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": f"sys/{certificate['metadata']['name']}"}
    assert {"port": "webhook"} in [p for r in one(objects, "NetworkPolicy")["spec"]["ingress"] for p in r["ports"]]
    crd = manifest()["spec"]
    (rule,) = hook["rules"]
    assert (rule["apiGroups"], rule["resources"]) == ([crd["group"]], [crd["names"]["plural"]])
    assert rule["apiVersions"] == [v["name"] for v in crd["versions"]]
    assert hook["failurePolicy"] == "Fail" and "namespaceSelector" not in hook


def test_the_webhook_takes_a_given_certificate():
    given = {"enabled": True, "secretName": "mine", "caBundle": CA, "failurePolicy": "Ignore"}
    scoped = {"watch": {"scope": "namespaces", "namespaces": ["a", "b"]}}
    objects = render(OPERATOR, {"webhook": given, **scoped})
    (hook,) = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    assert hook["clientConfig"]["caBundle"] == CA and hook["failurePolicy"] == "Ignore"
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == ["a", "b"]
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "webhook-tls", "secret": {"secretName": "mine"}} in volumes
    assert not [o for o in objects if o["kind"] in ("Issuer", "Certificate")]
    own = {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "corp"}}}
    objects = render(OPERATOR, {"webhook": own})
    assert one(objects, "Certificate")["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": "corp"}
    assert not [o for o in objects if o["kind"] == "Issuer"]


def test_a_webhook_without_a_certificate_or_trust_is_refused():
    assert "webhook.certManager.enabled" in refusal(OPERATOR, {"webhook": {"enabled": True}})
    assert "would not trust" in refusal(OPERATOR, {"webhook": {"enabled": True, "secretName": "mine"}})


def test_without_the_webhook_nothing_of_it_is_made():
    objects = render(OPERATOR)
    assert "webhook" not in yaml.safe_dump([o for o in objects if o["kind"] != "CustomResourceDefinition"]).lower()


def test_viewers_may_not_write():
    objects = render(OPERATOR)
    view, edit = (rules(objects, "ClusterRole", f"rel-dpi-operator-{r}") for r in ("view", "edit"))
    assert set().union(*view.values()) == {"get", "list", "watch"}
    assert {"create", "update", "patch", "delete"} <= edit["dpinference.dev", "dataparallelinferences"]
    assert "create" not in edit["dpinference.dev", "dataparallelinferences/status"]


def test_the_operators_pod_meets_the_restricted_standard():
    spec = one(render(OPERATOR), "Deployment")["spec"]["template"]["spec"]
    container = spec["containers"][0]["securityContext"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_alerts_and_dashboards_are_the_files():
    objects = render(OPERATOR, EVERYTHING)
    assert one(objects, "PrometheusRule")["spec"] == yaml.safe_load((OPERATOR / "files/alerts.yaml").read_text())
    for file in (OPERATOR / "dashboards").glob("*.json"):
        held = one(objects, "ConfigMap", f"rel-dpi-operator-{file.stem}")
        assert json.loads(held["data"][file.name]) == json.loads(file.read_text())
        assert held["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert held["metadata"]["namespace"] == "grafana"


def numbered(value):
    """With a number, a flag and text that looks like one in every place for labels and the like."""
    texts = {"count": 5, "large": 12345678, "flag": True, "text": "1e3", "empty": ""}
    places = ("labels", "annotations", "podLabels", "podAnnotations", "nodeSelector")
    return {k: texts if k in places else numbered(v) if isinstance(v, dict) else v for k, v in value.items()}


@pytest.mark.parametrize("chart", [OPERATOR, ONE], ids=lambda c: c.name)
def test_labels_and_the_like_are_texts_whatever_they_look_like(chart):
    values = numbered(yaml.safe_load((chart / "values.yaml").read_text()) | (EVERYTHING if chart is OPERATOR else {}))
    if chart is OPERATOR:
        values["webhook"] |= {"enabled": True, "certManager": {"enabled": True}}
        values["commonLabels"] = {"common": 5}
    text, seen = {"count": "5", "large": "12345678", "flag": "true", "text": "1e3", "empty": ""}, 0

    def look(node):
        nonlocal seen
        if isinstance(node, dict) and "count" in node:
            assert text.items() <= node.items()
            seen += 1
        for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            look(below)

    objects = render(chart, values)
    look(objects)
    assert seen >= (7 if chart is OPERATOR else 2)
    if chart is OPERATOR:
        assert one(objects, "Deployment")["metadata"]["labels"]["common"] == "5"
    for document in objects:
        check_object(document)


@pytest.mark.parametrize("word", ["123", "1e3", "on", "null"])
def test_names_of_releases_and_namespaces_are_texts_whatever_they_look_like(word):
    done = helm("template", word, str(OPERATOR), "--namespace", word, "--set-string", f"nameOverride={word}")
    objects = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert {o["metadata"].get("namespace", word) for o in objects} == {word}
    for labels in (one(objects, "Deployment")["spec"]["selector"]["matchLabels"], objects[0]["metadata"]["labels"]):
        assert (labels["app.kubernetes.io/name"], labels["app.kubernetes.io/instance"]) == (word, word)
    if word.isalpha():  # as names of our objects have to begin
        (made,) = yaml.safe_load_all(helm("template", word, str(ONE), "--namespace", word).stdout)
        assert (made["metadata"]["name"], made["metadata"]["namespace"]) == (word, word)


def test_a_monitor_of_a_service_that_is_not_made_is_refused():
    off = {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}
    assert "metrics.serviceMonitor.enabled without metrics.enabled" in refusal(OPERATOR, off)


def test_wrong_values_are_refused_before_anything_is_made():
    assert "scope" in refusal(OPERATOR, {"watch": {"scope": "everything"}})
    assert "paralelism" in refusal(ONE, {"paralelism": {}})


def test_the_plain_manifest_is_the_chart():
    import manifests

    program = manifests.helm()
    if program is None:
        from chart_render import HELM as program
    assert (ROOT / manifests.INSTALL).read_text() == manifests.install_yaml(program), "run `make manifests`"
    documents = list(yaml.safe_load_all((ROOT / manifests.INSTALL).read_text()))
    for document in documents:
        check_object(document)
    assert {"Namespace", "CustomResourceDefinition", "Deployment"} <= {d["kind"] for d in documents}
    assert "helm" not in (ROOT / manifests.INSTALL).read_text().lower().replace("kubectl apply", "")


def test_the_small_chart_gives_one_object_that_is_accepted():
    objects = render(ONE)
    assert [o["kind"] for o in objects] == ["DataParallelInference"]
    check_object(objects[0])
    dpi = read_document(objects[0], "chart")
    assert validate(dpi) == []
    assert dpi.spec.engine.image == "dpinference/engine:0.1.0"
    assert dpi.metadata.name == "rel"


def test_the_small_chart_passes_every_field_on():
    sample = read_manifest(str(ROOT / "manifests/samples/gpu-moe-multiport.yaml"))
    document = yaml.safe_load((ROOT / "manifests/samples/gpu-moe-multiport.yaml").read_text())
    values = document["spec"] | {"fullnameOverride": sample.metadata.name, "labels": {"a": "b"}}
    dpi = read_document(one(render(ONE, values), "DataParallelInference"), "chart")
    assert dpi.spec == sample.spec
    assert dpi.metadata.name == sample.metadata.name and dpi.metadata.labels["a"] == "b"


def test_an_autoscaler_may_own_replicas():
    assert "replicas" not in one(render(ONE, {"replicas": None}), "DataParallelInference")["spec"]
