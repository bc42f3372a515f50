"""The HTTP side: listeners, server, connections, app, routes. Read server.py first."""
