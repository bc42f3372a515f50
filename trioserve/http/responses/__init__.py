"""OpenAI's Responses API: bodies, what is kept, events."""
