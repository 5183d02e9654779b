"""Validate the Kubernetes objects on stdin, a JSON list, for versions; print a JSON list of complaints.

The Python of the tools runs this: validate_builtin.py VERSION... Unknown keys are refused.
"""

import functools
import json
import sys

import kubernetes_validate
from kubernetes_validate import utils

# The definitions of a version have megabytes. They and the list of versions would be read again for each object.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def main() -> None:
    """Validate and print."""
    complaints = []
    for document in json.load(sys.stdin):
        for version in sys.argv[1:]:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                place = "/".join(map(str, error.path))
                complaints.append(
                    f"{version}: {document['kind']} {document['metadata']['name']}: {place}: {error.message}"
                )
    print(json.dumps(complaints))


if __name__ == "__main__":
    main()
