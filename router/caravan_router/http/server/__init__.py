"""HTTP without any dialect: port, TLS, connections, middleware, bodies, streams, errors."""
