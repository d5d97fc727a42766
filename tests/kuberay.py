"""A JSON schema of what our manifests may contain: the fields of KubeRay 1.6 and 1.7's RayCluster and RayJob, and the parts of a pod
that nodes of GPUs need.

Written from the field names, types and rules of ray-operator/apis/ray/v1 in github.com/ray-project/kuberay. Kubernetes drops unknown fields
silently, so objects here are closed.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "minimum": 0}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kKMGTP]i?)?$"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def closed(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


METADATA = closed({"name": NAME, "namespace": NAME, "labels": TEXTS, "annotations": TEXTS}, "name")
SECRET_KEY = closed({"name": TEXT, "key": TEXT, "optional": BOOLEAN}, "name", "key")
VARIABLE = {
    **closed({"name": TEXT, "value": TEXT, "valueFrom": closed({"secretKeyRef": SECRET_KEY}, "secretKeyRef")}, "name"),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
RESOURCES = closed({kind: {"type": "object", "additionalProperties": QUANTITY} for kind in ("requests", "limits")})
RIGHTS = closed(
    {"allowPrivilegeEscalation": BOOLEAN, "privileged": BOOLEAN, "capabilities": closed({"add": array(TEXT), "drop": array(TEXT)})}
)
CONTAINER = closed(
    {
        **{"name": NAME, "image": TEXT, "workingDir": TEXT, "command": array(TEXT), "args": array(TEXT), "env": array(VARIABLE)},
        **{"resources": RESOURCES, "securityContext": RIGHTS, "imagePullPolicy": one_of("Always", "IfNotPresent", "Never")},
        "volumeMounts": array(closed({"name": NAME, "mountPath": TEXT, "subPath": TEXT, "readOnly": BOOLEAN}, "name", "mountPath")),
    },
    "name",
    "image",
)
VOLUME = closed(
    {
        "name": NAME,
        "persistentVolumeClaim": closed({"claimName": TEXT, "readOnly": BOOLEAN}, "claimName"),
        "emptyDir": closed({"medium": one_of("", "Memory"), "sizeLimit": QUANTITY}),
    },
    "name",
)
POD = closed(
    {
        "terminationGracePeriodSeconds": COUNT,
        "securityContext": closed({"runAsNonRoot": BOOLEAN, "runAsUser": COUNT, "runAsGroup": COUNT, "fsGroup": COUNT}),
        "initContainers": array(CONTAINER),
        "containers": array(CONTAINER),
        "volumes": array(VOLUME),
        "nodeSelector": TEXTS,
        "hostNetwork": BOOLEAN,
        "tolerations": array(closed({"key": TEXT, "operator": one_of("Exists", "Equal"), "value": TEXT, "effect": TEXT})),
    },
    "containers",
)
TEMPLATE = closed({"metadata": closed({"labels": TEXTS, "annotations": TEXTS}), "spec": POD}, "spec")
GROUP = {"rayStartParams": TEXTS, "resources": TEXTS, "labels": TEXTS, "template": TEMPLATE}
HEAD = closed({**GROUP, "serviceType": one_of("ClusterIP", "NodePort", "LoadBalancer")}, "template")
WORKERS = closed(
    {**GROUP, "groupName": NAME, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT, "idleTimeoutSeconds": COUNT}
    | {"numOfHosts": COUNT, "suspend": BOOLEAN},
    *("groupName", "minReplicas", "maxReplicas", "template"),
)
CLUSTER = closed(
    {
        "rayVersion": TEXT,
        "authOptions": closed({"mode": one_of("disabled", "token"), "secretName": TEXT}),
        "headGroupSpec": HEAD,
        "workerGroupSpecs": array(WORKERS),
        "headServiceAnnotations": TEXTS,
        "suspend": BOOLEAN,
    },
    "headGroupSpec",
)
JOB = {
    **closed(
        {
            **{"entrypoint": TEXT, "runtimeEnvYAML": TEXT, "jobId": TEXT, "metadata": TEXTS, "clusterSelector": TEXTS},
            **{"entrypointNumCpus": NUMBER, "entrypointNumGpus": NUMBER, "entrypointResources": TEXT, "suspend": BOOLEAN},
            **{"activeDeadlineSeconds": COUNT, "preRunningDeadlineSeconds": {"type": "integer", "minimum": 1}, "backoffLimit": COUNT},
            **{"shutdownAfterJobFinishes": BOOLEAN, "ttlSecondsAfterFinished": COUNT, "rayClusterSpec": CLUSTER},
            "submissionMode": one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        },
        *("entrypoint", "rayClusterSpec"),
    ),
    # A time to live has an effect only when the cluster is removed.
    "dependentSchemas": {"ttlSecondsAfterFinished": {"properties": {"shutdownAfterJobFinishes": {"const": True}}}},
}
CLAIM = closed(
    {"accessModes": array(one_of("ReadWriteOnce", "ReadWriteMany")), "storageClassName": TEXT, "resources": RESOURCES}, "accessModes"
)


def of_kind(version: str, kind: str, spec: Schema) -> Schema:
    found = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": METADATA, "spec": spec}
    return closed(found, *found)


SCHEMAS = {
    "RayCluster": of_kind("ray.io/v1", "RayCluster", CLUSTER),
    "RayJob": of_kind("ray.io/v1", "RayJob", JOB),
    "Pod": of_kind("v1", "Pod", POD),
    "PersistentVolumeClaim": of_kind("v1", "PersistentVolumeClaim", CLAIM),
}
