"""Run by `helm test`: the API server knows the object and its rules, and the operator answers. Standard library only."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
GOOD = {"model": {"name": "m"}, "engine": {"image": "e"}, "replicas": 0}
BAD = {**GOOD, "parallelism": {"dataParallelSize": 3, "dataParallelSizeLocal": 2}}


def create(spec):
    """Asks the API server to create an object without keeping it -> (status, answer)."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    with open(f"{ACCOUNT}/token", encoding="utf-8") as token, open(f"{ACCOUNT}/namespace", encoding="utf-8") as name:
        bearer, namespace = token.read(), name.read()
    body = {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": "helm-test"},
        "spec": spec,
    }
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/dpinference.dev/v1alpha1/namespaces/{namespace}/dataparallelinferences?dryRun=All",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(
            request, timeout=10, context=ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def main():
    failed = 0

    def check(what, good, detail):
        nonlocal failed
        failed += not good
        print(("ok      " if good else "FAILED  ") + what + ("" if good else f": {detail}"))

    status, answer = create(GOOD)
    check("the API server takes an object", status == 201, f"{status} {answer}")
    status, answer = create(BAD)
    refused = status == 422 and "must divide dataParallelSize" in answer
    check("and refuses one with a wrong number of ranks", refused, f"{status} {answer}")
    if len(sys.argv) > 1:
        text = get(sys.argv[1])
        check("the operator's metrics are served", "\ndpi_" in text, text[:200])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
