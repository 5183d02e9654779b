"""Print JSON schemas of the custom resources that the chart uses, by kind. The Python of the tools runs this."""

import json
from typing import Any

from cloudcoil.models.cert_manager.v1 import Certificate, Issuer
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule, ServiceMonitor


def strict(schema: Any) -> Any:
    """Return the schema with unknown keys refused: the models ignore them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(part) for name, part in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        # Go's syntax: Python wants the flag first.
        closed["pattern"] = pattern.replace("^(?i)", "(?i)^")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def main() -> None:
    """Print them."""
    models = (Certificate, Issuer, PodMonitor, PrometheusRule, ScaledObject, ServiceMonitor)
    print(json.dumps({model.__name__: strict(model.model_json_schema(by_alias=True)) for model in models}))


if __name__ == "__main__":
    main()
