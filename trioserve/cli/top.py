"""``trioserve top``: a look at a running server. The work is in ``trioserve.top``."""

from __future__ import annotations

import sys
from typing import NoReturn

import click


@click.command()
@click.argument("url", required=False)
@click.option("--uds", metavar="PATH", help="Unix socket the server listens on instead of TCP.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="TRIOSERVE_API_KEY",
    help="A key of the server's; better in TRIOSERVE_API_KEY, for others can see command lines.",
)
@click.option("--once", is_flag=True, help="Print one snapshot as plain text and end.")
def top(
    url: str | None, uds: str | None, interval: float, api_key: str | None, once: bool
) -> NoReturn:
    """Watch a running server: stages while it loads, then requests, cache, rates, latencies.

    URL is http://127.0.0.1:8000 if not given. Drawn in place on a terminal; elsewhere a line each
    time. Rates are means over 5 s, quantiles those of the last minute, and both of less until that
    long was looked; what holds is said beside them. With --once, which has no past to compare with,
    there are no rates and quantiles are since the start.

    Ctrl-C ends it with exit code 0, or 130 with --once; 1: --once had no answer; 2: the command
    line; 143: SIGTERM.
    """
    from trioserve.config.access import KEY
    from trioserve.top.client import Address, parse_url
    from trioserve.top.loop import run_top

    if url is not None and uds is not None:
        raise click.UsageError("give a URL or --uds, not both")
    if api_key is not None and not KEY.fullmatch(api_key):
        raise click.UsageError("the API key must be printable ASCII without spaces")
    if uds is not None:
        address = Address(uds=uds, api_key=api_key)
    else:
        try:
            address = parse_url(url or "http://127.0.0.1:8000", api_key)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    sys.exit(run_top(address, interval_s=interval, once=once))
