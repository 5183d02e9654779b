"""The command `caravan key`: a fresh API key, and the entry for --api-keys-file."""

import argparse
import secrets
import sys
from collections.abc import Sequence

from caravan_router.auth.key import digest_of
from caravan_router.auth.key_file import KeyFileError, check_name


def main(argv: Sequence[str] | None = None) -> int:
    """The key goes to stderr and the entry to stdout: ``caravan key alice >> keys.toml`` writes down no secret."""
    parser = argparse.ArgumentParser(prog="caravan key", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help="whose key it is: in the log, and the tenant of its requests")
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
