"""Commands of the command line, one module each: its function `add` adds the parser.

`cluster` has three commands: `up`, `down` and `update`. `outcome` prints an update for those that make one.
"""
