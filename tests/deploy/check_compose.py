"""Print the services of compose.yaml as JSON, if it is valid. Runs where compose_spec is, with the file on stdin.

compose_spec refuses unknown keys and values of a wrong form.
"""

import json
import sys

import yaml
from compose_spec import PyCompose

# compose_spec knows no merge keys, which PyYAML resolves.
document = yaml.safe_load(sys.stdin.read())
PyCompose.from_yaml(yaml.safe_dump(document))
print(json.dumps(document["services"]))
