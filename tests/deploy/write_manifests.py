"""Write what is generated from the code and the chart: flags in values.schema.json, deploy/kubernetes, a README."""

import json

from deploy.chart import CHART, MANIFESTS, RENDERED, SCHEMA, manifest
from deploy.flag_schema import with_flags
from deploy.values_table import README, with_table


def main() -> None:
    """Write the files. The schema comes first, because helm reads it."""
    schema = with_flags(json.loads(SCHEMA.read_text()))
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")
    MANIFESTS.mkdir(exist_ok=True)
    for name in RENDERED:
        (MANIFESTS / f"{name}.yaml").write_text(manifest(CHART / f"ci/{name}.yaml"))
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()
