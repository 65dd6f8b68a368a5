"""Kubernetes' own schemas, and the programs of a cluster's user; see tools/kubernetes_schemas.py and setup.sh."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import jsonschema_rs

ROOT = Path(__file__).parents[2]
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes.json").read_text())


@cache
def validator(kind):
    definitions = json.loads(json.dumps(SCHEMAS["$defs"]).replace("/api/_definitions.json#/", "#/"))
    schema = {"$defs": definitions, "$ref": f"#/$defs/{SCHEMAS['kinds'][kind]}"}
    return jsonschema_rs.validator_for(schema)


def errors(manifest):
    """What an API server would say against a manifest; a field that it does not know is an error."""
    kind = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
    if kind not in SCHEMAS["kinds"]:
        return [f"{kind}: no such kind in tools/kubernetes_schemas.py"]
    found = [
        f"{'.'.join(map(str, error.instance_path))}: {error.message}" for error in validator(kind).iter_errors(manifest)
    ]
    return [f"{kind} {manifest['metadata'].get('name')}: {error}" for error in found]


def helm():
    """The helm program; None if there is none."""
    beside = ROOT / ".peers" / "kubernetes" / "helm"
    return os.environ.get("AGL_HELM") or (str(beside) if beside.exists() else shutil.which("helm"))
