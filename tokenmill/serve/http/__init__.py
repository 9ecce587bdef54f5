"""HTTP below the endpoints: connections, bodies, errors, keys and tenants, one request's life, server-sent events."""
