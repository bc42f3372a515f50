"""The routes, one module per concern; each has ``register(app)``."""
