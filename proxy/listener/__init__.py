"""The HTTP server for clients: connections, TLS, header deadlines, invalid requests, bodies, replies and drain."""
