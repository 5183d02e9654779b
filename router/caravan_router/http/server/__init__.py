"""HTTP without any dialect: port, connections, middleware, bodies, streams, errors."""
