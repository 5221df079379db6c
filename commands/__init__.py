"""Commands of the command line, one module each, whose function `add` adds the parser.

- `cluster`: `weightcast up`, `down` and `update`
- `demo`: `weightcast demo`
- `gateway`: `weightcast gateway`
- `inspect`: `weightcast inspect`
- `load`: `weightcast load`
- `outcome`: output of an update, for the commands that make one
- `plan`: `weightcast plan`
- `status`: `weightcast status`, and the option `--gateway` that others share
"""
