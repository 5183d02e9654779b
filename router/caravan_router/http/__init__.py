"""The API over HTTP: server, routes and streams. The dialects themselves are in `caravan_dialects.api`."""
