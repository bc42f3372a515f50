"""``python -m trioserve`` is the ``trioserve`` program."""

from trioserve.cli import main

if __name__ == "__main__":
    main()
