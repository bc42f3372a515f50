"""Serve a model inside a trio program: two prompts at once, tokens as they come.

$ .venv/bin/python examples/embed.py [model.toml]
"""

import sys

import trio

import trioserve


async def show(engine: trioserve.Engine, name: str, prompt: str) -> None:
    """Stream one answer; leaving the block early would abort the request."""
    sampling = trioserve.SamplingParams(temperature=0.0, max_tokens=24)
    messages = [{"role": "user", "content": prompt}]
    async with engine.generate(messages, sampling) as stream:
        async for delta in stream:
            print(f"{name}: {delta.text!r}")
        print(f"{name}: {stream.usage.completion_tokens} tokens")


async def main() -> None:
    """Two requests share the batch; the worker has ended when the outer block is left."""
    config = sys.argv[1] if len(sys.argv) > 1 else None
    async with trioserve.open_engine(config) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(show, engine, "sky", "Why is the sky blue?")
        nursery.start_soon(show, engine, "tea", "How do I make tea?")


if __name__ == "__main__":
    trio.run(main)
