"""Objects for the tests of the CRD, and what an API server does to one before it evaluates rules."""

import copy
from typing import Any


def make(name: str = "demo", **spec: Any) -> dict[str, Any]:
    """The smallest object, with parts of spec on top of it (merged one level deep)."""
    base: dict[str, Any] = {"model": {"name": "m"}, "engine": {"image": "engine:1"}}
    for key, value in spec.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": name},
        "spec": copy.deepcopy(base),
    }


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """`value` with the defaults of a structural schema, from the top down, as the API server applies them."""
    if isinstance(value, dict):
        for key, below in schema.get("properties", {}).items():
            if key not in value and "default" in below:
                value[key] = copy.deepcopy(below["default"])
            if key in value:
                value[key] = defaulted(value[key], below)
    if isinstance(value, list):
        return [defaulted(v, schema.get("items", {})) for v in value]
    return value


MANY = {"dataParallelSize": 8, "dataParallelSizeLocal": 2}

REFUSED = [
    ("name", make("a" * 41)),
    ("dotted name", make("a.b")),
    ("name with a digit first", make("1a")),
    ("local does not divide", make(parallelism={"dataParallelSize": 3, "dataParallelSizeLocal": 2})),
    ("experts of a dense model", make(parallelism={"expertParallel": True})),
    ("independent experts", make(model={"architecture": "MoE"}, parallelism={"coupling": "Independent"})),
    ("too many ranks", make(replicas=1000, parallelism={"dataParallelSize": 5})),
    ("pipeline", make(parallelism={"pipelineParallelSize": 2})),
    (
        "experts spread over ranks and cut over workers",
        make(model={"architecture": "MoE"}, parallelism={"expertParallel": True, "tensorParallelSize": 2}),
    ),
    (
        "another image for a rank of a MoE group",
        make(
            model={"architecture": "MoE"},
            parallelism={"dataParallelSize": 2},
            rankOverrides=[{"ranks": "0"}, {"ranks": "1", "image": "engine:2"}],
        ),
    ),
    (
        "API servers of MultiPort",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort"}, engine={"apiServerCount": 2}),
    ),
    (
        "one rank of a coupled group",
        make(failurePolicy={"action": "RecreateRank"}, parallelism={"coupling": "Coupled"}),
    ),
    ("one rank of a MoE group", make(failurePolicy={"action": "RecreateRank"}, model={"architecture": "MoE"})),
    ("back-off upside down", make(failurePolicy={"backoff": {"baseSeconds": 10, "maxSeconds": 5}})),
    ("back-off above the default bound", make(failurePolicy={"backoff": {"baseSeconds": 601}})),
    ("grace too short", make(lifecycle={"terminationGracePeriodSeconds": 60})),
    ("External with two ranks per pod", make(parallelism=MANY, loadBalancing={"mode": "External"})),
    ("MultiPort with one rank per pod", make(parallelism={"dataParallelSize": 8}, loadBalancing={"mode": "MultiPort"})),
    (
        "management among the front ends",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort"}, engine={"ports": {"management": 8001}}),
    ),
    (
        "a Service whose last port is too high",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort", "service": {"port": 65535}}),
    ),
    (
        "supervisor among the front ends",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort"}, engine={"ports": {"supervisor": 8001}}),
    ),
    (
        "pool of 16 ports",
        make(
            parallelism={"dataParallelSize": 16, "dataParallelSizeLocal": 16},
            loadBalancing={
                "mode": "MultiPort",
                "inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}},
            },
        ),
    ),
    ("pool without picker", make(loadBalancing={"inferencePool": {"enabled": True}})),
    (
        "Services for more ranks than that over all groups",
        make(replicas=5, parallelism={"dataParallelSize": 64}, loadBalancing={"perRankServices": True}),
    ),
    ("Services for 65 ranks", make(parallelism={"dataParallelSize": 65}, loadBalancing={"perRankServices": True})),
    ("no way to roll", make(rollout={"maxUnavailable": 0})),
    ("no way to roll, in per cent", make(rollout={"maxUnavailable": "0%", "maxSurge": "0%"})),
    ("two caches", make(storage={"modelCache": {"emptyDir": {}, "pvc": {"claimName": "c"}}})),
    (
        "several at once",
        make(parallelism={**MANY, "expertParallel": True, "dataParallelSize": 7}, rollout={"maxUnavailable": 0}),
    ),
]
"""What a rule refuses."""

ACCEPTED = [
    ("the smallest", make()),
    ("longest name", make("a" * 40)),
    ("pods of two ranks", make(parallelism=MANY)),
    ("experts", make(model={"architecture": "MoE"}, parallelism={**MANY, "expertParallel": True})),
    ("most ranks", make(replicas=4, parallelism={"dataParallelSize": 1024})),
    ("pipeline of the other runtime", make(engine={"runtime": "vllm"}, parallelism={"pipelineParallelSize": 2})),
    (
        "experts and workers of the other runtime",
        make(
            engine={"runtime": "vllm"},
            model={"architecture": "MoE"},
            parallelism={"expertParallel": True, "tensorParallelSize": 2},
        ),
    ),
    (
        "the same image for a rank of a MoE group",
        make(
            model={"architecture": "MoE"},
            parallelism={"dataParallelSize": 3},
            rankOverrides=[{"ranks": "0", "image": ""}, {"ranks": "1", "image": "engine:1"}, {"ranks": "2"}],
        ),
    ),
    ("another image for a rank", make(rankOverrides=[{"ranks": "0", "image": "engine:2"}])),
    (
        "one API server each",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort"}, engine={"apiServerCount": 1}),
    ),
    ("one rank", make(failurePolicy={"action": "RecreateRank"})),
    ("no limit of restarts", make(failurePolicy={"maxRestarts": None})),
    ("External", make(parallelism={"dataParallelSize": 8}, loadBalancing={"mode": "External"})),
    ("MultiPort", make(parallelism=MANY, loadBalancing={"mode": "MultiPort"})),
    (
        "supervisor next to the front ends",
        make(parallelism=MANY, loadBalancing={"mode": "MultiPort"}, engine={"ports": {"supervisor": 8002}}),
    ),
    (
        "supervisor among ports that only MultiPort has",
        make(parallelism=MANY, engine={"ports": {"supervisor": 8001}}),
    ),
    (
        "pool",
        make(
            parallelism={"dataParallelSize": 8, "dataParallelSizeLocal": 8},
            loadBalancing={
                "mode": "MultiPort",
                "inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}},
            },
        ),
    ),
    (
        "Services for 64 ranks",
        make(replicas=4, parallelism={"dataParallelSize": 64}, loadBalancing={"perRankServices": True}),
    ),
    ("surge alone", make(rollout={"maxUnavailable": 0, "maxSurge": "25%"})),
    ("BlueGreen needs neither", make(rollout={"strategy": "BlueGreen", "maxUnavailable": 0})),
    ("a claim", make(storage={"modelCache": {"pvc": {"claimName": "c"}}})),
]
"""What stands just inside the rules."""

MALFORMED = [
    ("no image", {**make(), "spec": {"model": {"name": "m"}}}, "spec.engine"),
    ("size 0", make(parallelism={"dataParallelSize": 0}), "spec.parallelism.dataParallelSize"),
    ("size as text", make(parallelism={"dataParallelSize": "2"}), "spec.parallelism.dataParallelSize"),
    ("unknown mode", make(loadBalancing={"mode": "Round"}), "spec.loadBalancing.mode"),
    ("unknown scheme", make(model={"uri": "s3://bucket/x"}), "spec.model.uri"),
    ("port out of range", make(engine={"ports": {"http": 70000}}), "spec.engine.ports.http"),
    ("pull policy", make(engine={"imagePullPolicy": "Sometimes"}), "spec.engine.imagePullPolicy"),
    ("range of ranks", make(rankOverrides=[{"ranks": "a"}]), "spec.rankOverrides"),
    ("more than all", make(rollout={"maxUnavailable": "101%"}), "spec.rollout.maxUnavailable"),
    ("shared memory", make(storage={"sharedMemory": "lots"}), "spec.storage.sharedMemory"),
    ("a time", make(restartedAt="yesterday"), "spec.restartedAt"),
]
"""What types and bounds of single fields refuse, and the field."""
