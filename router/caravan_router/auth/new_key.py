"""The command `caravan key`: create an API key and print its entry for --api-keys-file."""

import argparse
import secrets
import sys
from collections.abc import Sequence

from caravan_dialects.auth.key import digest_of
from caravan_router.auth.key_file import KeyFileError, check_name


def main(argv: Sequence[str] | None = None) -> int:
    """Print the key to stderr and its entry to stdout, so that ``caravan key alice >> keys.toml`` stores no secret."""
    parser = argparse.ArgumentParser(prog="caravan key", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help="name of the key's owner, for the log and as tenant of its requests")
    parser.add_argument("--operator", action="store_true", help="allow the routes under /admin")
    arguments = parser.parse_args(argv)
    name: str = arguments.name
    try:
        check_name("NAME", name)
    except KeyFileError as error:
        parser.error(str(error))
    secret = secrets.token_urlsafe(32)
    sys.stderr.write(f"The key, shown only now: {secret}\n")
    sys.stderr.flush()
    operator = "operator = true\n" if arguments.operator else ""
    sys.stdout.write(f'\n[[keys]]\nname = "{name}"\nsha256 = "{digest_of(secret).hex()}"\n{operator}')
    return 0
