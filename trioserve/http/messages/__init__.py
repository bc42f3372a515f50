"""Anthropic's Messages API: bodies, events, errors."""
