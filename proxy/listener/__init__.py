"""The HTTP server for clients: connections, deadlines for headers, malformed requests, bodies, replies, the drain."""
