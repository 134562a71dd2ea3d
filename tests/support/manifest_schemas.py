"""What OpenPAI and Kubernetes accept, as far as our job files use it: written from the published schemas' rules.

OpenPAI: microsoft/openpai-protocol, schemas/v2/schema.yaml (v2.0.0-alpha), commit 8cdfc26b336b (2021-02-04).
MPIJob: kubeflow/mpi-operator, deploy/v2beta1/mpi-operator.yaml (CRD mpijobs.kubeflow.org, v2beta1) and
pkg/apis/kubeflow/validation/validation.go, commit caa3c47fc42e (2026-07-02). TrainJob and TrainingRuntime:
kubeflow/trainer, manifests/base/crds (v1alpha1), commit 0f13bb7a0197, and the JobSet (v1alpha2) inside. All are open
where these are closed: a field that is not listed is more likely misspelt than meant.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(fields: dict[str, Any], *required: str) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def each(of: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def whole(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": r"^[a-zA-Z0-9_-]+$", "minLength": 1, "maxLength": 255}
YES: Schema = {"type": "boolean"}

_PAI_ROLE = record(
    {
        "instances": whole(1),
        "completion": record({"minFailedInstances": {"type": "integer"}, "minSucceededInstances": {"type": "integer"}}),
        "taskRetryCount": whole(0),
        "dockerImage": TEXT,
        "resourcePerInstance": record(
            {
                "cpu": whole(1),
                "memoryMB": whole(1),
                "gpu": whole(0),
                "ports": {"type": "object", "additionalProperties": whole(1)},
            },
            "cpu", "memoryMB", "gpu",
        ),
        "extraContainerOptions": record({"shmMB": whole(1), "infiniband": YES}),
        "commands": each(TEXT, 1),
    },
    "dockerImage", "resourcePerInstance", "commands",
)  # fmt: skip

OPENPAI = record(
    {
        "protocolVersion": one_of(2, "2"),
        "name": NAME,
        "type": one_of("job"),
        "description": TEXT,
        "jobRetryCount": whole(0),
        "parameters": {"type": "object"},
        "prerequisites": each(
            record(
                {"protocolVersion": one_of(2, "2"), "name": NAME, "type": one_of("dockerimage"), "uri": TEXT},
                "name", "type", "uri",
            ),
            1,
        ),
        # the name of a role becomes part of variables' names
        "taskRoles": {
            "type": "object",
            "patternProperties": {r"^[a-zA-Z_][a-zA-Z0-9_]*$": _PAI_ROLE},
            "additionalProperties": False,
            "minProperties": 1,
        },
        "defaults": record({"virtualCluster": TEXT}),
        "extras": record({"gangAllocation": YES}),
    },
    "protocolVersion", "name", "type", "prerequisites", "taskRoles",
)  # fmt: skip

_QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9.]+(m|[KMGT]i?)?$"}]},
}
_FIELD = record({"fieldRef": record({"fieldPath": TEXT}, "fieldPath")})
_CONTAINER = record(
    {
        "name": TEXT,
        "image": TEXT,
        "args": each(TEXT, 1),
        "env": each(record({"name": TEXT, "value": TEXT, "valueFrom": _FIELD}, "name")),
        "ports": each(record({"name": TEXT, "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}})),
        "readinessProbe": record({"tcpSocket": record({"port": whole(1)}, "port"), "periodSeconds": whole(1)}),
        "resources": record({"requests": _QUANTITIES, "limits": _QUANTITIES}),
        "securityContext": record({"allowPrivilegeEscalation": YES, "capabilities": record({"drop": each(TEXT)})}),
        "volumeMounts": each(record({"name": TEXT, "mountPath": TEXT}, "name", "mountPath")),
    },
    "name", "image",
)  # fmt: skip
_POD_FIELDS: dict[str, Any] = {
    "containers": each(_CONTAINER, 1),
    "securityContext": record(
        {"runAsNonRoot": YES, "runAsUser": whole(1), "runAsGroup": whole(1), "fsGroup": whole(1)}
    ),
    "volumes": each(
        record(
            {
                "name": TEXT,
                "persistentVolumeClaim": record({"claimName": TEXT}, "claimName"),
                "emptyDir": record({"medium": one_of("", "Memory"), "sizeLimit": TEXT}),
            },
            "name",
        )
    ),
}
_POD = record(_POD_FIELDS, "containers")


def _replicas(number: Schema) -> Schema:
    template = record({"spec": _POD}, "spec")
    fields = {"replicas": number, "restartPolicy": one_of("Never", "OnFailure"), "template": template}
    return record(fields, "replicas", "template")


MPIJOB = record(
    {
        "apiVersion": one_of("kubeflow.org/v2beta1"),
        "kind": one_of("MPIJob"),
        # with "-worker-N" it is a DNS label
        "metadata": record({"name": {"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$"}}, "name"),
        "spec": record(
            {
                "mpiImplementation": one_of("OpenMPI", "Intel", "MPICH"),
                "slotsPerWorker": whole(0),
                "sshAuthMountPath": {"type": "string", "minLength": 1},
                "launcherCreationPolicy": one_of("AtStartup", "WaitForWorkersReady"),
                "runPolicy": record(
                    {
                        "cleanPodPolicy": one_of("None", "Running", "All"),
                        "backoffLimit": whole(0),
                        "ttlSecondsAfterFinished": whole(0),
                        "activeDeadlineSeconds": whole(0),
                    }
                ),
                "mpiReplicaSpecs": record(
                    {"Launcher": _replicas(one_of(1)), "Worker": _replicas(whole(1))}, "Launcher"
                ),
            },
            "mpiReplicaSpecs",
        ),
    },
    "apiVersion", "kind", "metadata", "spec",
)  # fmt: skip

# ---- Kubeflow Trainer v2

_LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
_DNS_LABEL: Schema = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
_TRAINER = "trainer.kubeflow.org"
_JOB = record(
    {
        "backoffLimit": whole(0),
        "template": record(
            {"spec": record(_POD_FIELDS | {"restartPolicy": one_of("Never", "OnFailure")}, "containers")}, "spec"
        ),
    },
    "template",
)
_REPLICATED_JOB = record(
    {
        "name": one_of("launcher", "node"),  # by which the MPI plugin knows them
        "dependsOn": each(record({"name": TEXT, "status": one_of("Ready", "Complete")}, "name", "status"), 1),
        "template": record({"metadata": record({"labels": _LABELS}), "spec": _JOB}, "spec"),
    },
    "name", "template",
)  # fmt: skip
_JOB_SET = record(
    {
        "network": record({"publishNotReadyAddresses": YES}),
        "successPolicy": record({"operator": one_of("All", "Any"), "targetReplicatedJobs": each(TEXT)}, "operator"),
        "replicatedJobs": each(_REPLICATED_JOB, 1),
    },
    "replicatedJobs",
)

TRAINING_RUNTIME = record(
    {
        "apiVersion": one_of(f"{_TRAINER}/v1alpha1"),
        "kind": one_of("TrainingRuntime"),
        "metadata": record({"name": _DNS_LABEL, "labels": _LABELS}, "name"),
        "spec": record(
            {
                "mlPolicy": record(
                    {
                        "numNodes": whole(1),
                        "mpi": record(
                            {
                                "mpiImplementation": one_of("OpenMPI"),
                                "numProcPerNode": whole(1),
                                "runLauncherAsNode": YES,
                                "sshAuthMountPath": {"type": "string", "minLength": 1},
                            }
                        ),
                    }
                ),
                "template": record({"spec": _JOB_SET}, "spec"),
            },
            "template",
        ),
    },
    "apiVersion", "kind", "metadata", "spec",
)  # fmt: skip

TRAINJOB = record(
    {
        "apiVersion": one_of(f"{_TRAINER}/v1alpha1"),
        "kind": one_of("TrainJob"),
        "metadata": record({"name": _DNS_LABEL}, "name"),
        "spec": record(
            {
                "runtimeRef": record(
                    {
                        "apiGroup": one_of(_TRAINER),
                        "kind": one_of("TrainingRuntime", "ClusterTrainingRuntime"),
                        "name": TEXT,
                    },
                    "name",
                ),
                "trainer": record({"numNodes": whole(1), "numProcPerNode": whole(1), "args": each(TEXT, 1)}),
            },
            "runtimeRef",
        ),
    },
    "apiVersion", "kind", "metadata", "spec",
)  # fmt: skip
