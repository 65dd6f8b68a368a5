"""Writes `tests/deploy/kubernetes.json`: Kubernetes' own JSON schemas of the kinds that our manifests use.

    pip install --target FOLDER --no-deps kubernetes-validate==1.37.0
    python -m tools.kubernetes_schemas FOLDER

That package has the schemas of Kubernetes' OpenAPI document (Apache-2.0), in their strict form: unknown fields are
errors. Descriptions are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

VERSION = "1.37.0"
KINDS = {
    "apps/v1 Deployment": "io.k8s.api.apps.v1.Deployment",
    "apps/v1 StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "batch/v1 Job": "io.k8s.api.batch.v1.Job",
    "networking.k8s.io/v1 NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "policy/v1 PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1 Role": "io.k8s.api.rbac.v1.Role",
    "rbac.authorization.k8s.io/v1 RoleBinding": "io.k8s.api.rbac.v1.RoleBinding",
    "v1 ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "v1 Pod": "io.k8s.api.core.v1.Pod",
    "v1 Service": "io.k8s.api.core.v1.Service",
    "v1 ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
}
TARGET = Path(__file__).parents[1] / "tests" / "deploy" / "kubernetes.json"


def main() -> None:
    folder = Path(sys.argv[1], "kubernetes_validate", "kubernetes-json-schema", f"v{VERSION}-local-strict")
    every = json.loads((folder / "_definitions.json").read_text())["$defs"]
    needed = _closure(every, list(KINDS.values()))
    content = {"version": VERSION, "kinds": KINDS, "$defs": {name: _without_prose(every[name]) for name in needed}}
    TARGET.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(f"{TARGET}: {len(needed)} definitions, {TARGET.stat().st_size} bytes")  # noqa: T201


def _closure(every: dict[str, Any], names: list[str]) -> list[str]:
    """These definitions and all that they refer to, sorted."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += re.findall(r'#/\$defs/([\w.]+)"', json.dumps(every[name]))
    return sorted(found)


def _without_prose(schema: Any, names: bool = False) -> Any:
    """The schema without descriptions; in a mapping from `names` of properties, every key stays."""
    if isinstance(schema, dict):
        return {
            key: _without_prose(value, key == "properties")
            for key, value in schema.items()
            if names or not (key == "description" or key.startswith("x-kubernetes"))
        }
    return [_without_prose(each) for each in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    main()
