"""`python -m fewbits.cli`: as `fewbits`, where that is not on the path."""

from fewbits.cli import main

main()
