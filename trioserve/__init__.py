"""trioserve: a server for large language models in one trio nursery tree."""

__version__ = "0.1.0"
