"""One module a command of the command line; `add` adds its parser."""
