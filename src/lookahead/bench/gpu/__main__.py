"""`python -m lookahead.bench.gpu`; needs neither typer nor rich."""

import sys

from lookahead.bench.gpu.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
