"""The command `caravan key`: make a new API key and print its entry for --api-keys-file."""

import argparse
import secrets
import sys
from collections.abc import Sequence

from caravan_router.auth.key import digest_of
from caravan_router.auth.key_file import KeyFileError, check_name


def main(argv: Sequence[str] | None = None) -> int:
    """Print the key to stderr and its entry to stdout, so that ``caravan key alice >> keys.toml`` stores no secret."""
    parser = argparse.ArgumentParser(prog="caravan key", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help="name of the key's holder, for the log and as tenant of its requests")
    name: str = parser.parse_args(argv).name
    try:
        check_name("NAME", name)
    except KeyFileError as error:
        parser.error(str(error))
    secret = secrets.token_urlsafe(32)
    sys.stderr.write(f"The key, shown only now: {secret}\n")
    sys.stderr.flush()
    sys.stdout.write(f'\n[[keys]]\nname = "{name}"\nsha256 = "{digest_of(secret).hex()}"\n')
    return 0
