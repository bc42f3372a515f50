"""``trioserve top``: what a running server is at, over its own HTTP, in a terminal or as lines.

``client`` asks, ``reading`` makes numbers of the answers and is pure, ``view`` shows them, ``loop``
goes round.
"""
