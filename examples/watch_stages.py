"""Watch a model load, then ask it one thing, with a deadline on the whole.

$ .venv/bin/python examples/watch_stages.py [model.toml]
"""

import sys

import trio

import trioserve


async def watch(engine: trioserve.Engine) -> None:
    """Print each stage once, as it ends."""
    said = set()
    async for status in engine.watch():
        for stage in status.stages:
            if stage.state == "done" and stage.seconds is not None and stage.name not in said:
                said.add(stage.name)
                print(f"{stage.name:10} {stage.seconds:6.2f} s  {stage.detail}")
        if status.phase is trioserve.Phase.READY:
            return


async def main() -> None:
    """The deadline reaches everything, the worker process included."""
    config = sys.argv[1] if len(sys.argv) > 1 else None
    with trio.fail_after(120):
        async with trioserve.open_engine(config, wait_ready=False) as engine:
            await watch(engine)
            sampling = trioserve.SamplingParams(temperature=0.0, max_tokens=16)
            async with engine.generate("Water boils at", sampling) as stream:
                text = "".join([delta.text async for delta in stream])
            print(f"Water boils at{text}")


if __name__ == "__main__":
    trio.run(main)
